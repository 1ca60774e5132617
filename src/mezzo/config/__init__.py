"""Recipes: command lines and PaddleSeg's YAML files as typed, frozen configuration."""

from mezzo.config._classification import classification_recipe
from mezzo.config._data import DataRecipe
from mezzo.config._errors import RecipeError
from mezzo.config._load import load_recipe
from mezzo.config._losses import LossRecipe
from mezzo.config._model import ModelRecipe
from mezzo.config._optimizers import OptimizerRecipe, ParameterGroup
from mezzo.config._recipe import Recipe
from mezzo.config._schedules import Schedule

__all__ = [
    "load_recipe",
    "classification_recipe",
    "Recipe",
    "ModelRecipe",
    "DataRecipe",
    "LossRecipe",
    "OptimizerRecipe",
    "ParameterGroup",
    "Schedule",
    "RecipeError",
]

"""Recipes: command lines and PaddleSeg's YAML files as typed, frozen configuration."""

from mezzo.vision.options import ClassifierOptions, RecipeOptions, classifiers
from mezzo.vision.recipes._classification import classification_recipe
from mezzo.vision.recipes._curves import CURVES, Curve
from mezzo.vision.recipes._data import DataRecipe
from mezzo.vision.recipes._errors import RecipeError
from mezzo.vision.recipes._load import load_recipe
from mezzo.vision.recipes._losses import ClassLoss, LossRecipe
from mezzo.vision.recipes._model import ModelRecipe
from mezzo.vision.recipes._optimizers import OptimizerRecipe, ParameterGroup
from mezzo.vision.recipes._recipe import Recipe
from mezzo.vision.recipes._schedules import Schedule

__all__ = [
    "load_recipe",
    "classification_recipe",
    "ClassifierOptions",
    "RecipeOptions",
    "classifiers",
    "Recipe",
    "ModelRecipe",
    "DataRecipe",
    "LossRecipe",
    "ClassLoss",
    "OptimizerRecipe",
    "ParameterGroup",
    "Schedule",
    "CURVES",
    "Curve",
    "RecipeError",
]

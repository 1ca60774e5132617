"""Recipes: what may stand in one, and which products are worth it."""

import pytest

from mezzo.amp import Fp8Recipe, Policy
from mezzo.fp8 import recipe_from_text, recipe_to_text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient": "e3m4"}, r"Fp8Recipe: unknown gradient 'e3m4'; allowed: .*e5m2"),
        ({"scaling": "now"}, "Fp8Recipe: unknown scaling 'now'; allowed: .*current"),
        ({"granularity": "block"}, "Fp8Recipe: unknown granularity 'block'; allowed: .*tensor"),
        ({"fast_accumulation": True}, "Fp8Recipe: unknown fast_accumulation 'True'; allowed: .*forward"),
        ({"history": 0}, "Fp8Recipe: history=0: must be a whole number, 1 or more"),
        ({"history": True}, "Fp8Recipe: history=True: must be a whole number, 1 or more"),
        ({"min_width": -1}, "Fp8Recipe: min_width=-1: must be a whole number, 0 or more"),
        ({"min_size": 1.5}, "Fp8Recipe: min_size=1.5: must be a whole number, 0 or more"),
        ({"emulate": "yes"}, "Fp8Recipe: emulate='yes': must be True or False"),
        ({"granularity": "row", "scaling": "delayed"}, "scaling='current'"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Fp8Recipe.of(settings)
    assert "\n" not in str(caught.value)


def test_a_recipe_is_made_from_a_mapping_and_is_itself_already() -> None:
    recipe = Fp8Recipe(gradient="e4m3")
    assert Fp8Recipe.of(recipe) is recipe
    assert Fp8Recipe.of(recipe.to_dict()) == recipe
    assert Fp8Recipe.of(None) == Fp8Recipe()
    assert recipe_from_text(recipe_to_text(recipe)) == recipe
    with pytest.raises(ValueError, match=r"'grad'.*'gradient'"):
        Fp8Recipe.of({"grad": "e4m3"})
    with pytest.raises(TypeError, match=r"'e4m3'.*Fp8Recipe"):
        Fp8Recipe.of("e4m3")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((2048, 8192, 8192), None),
        ((None, 8192, 8192), None),
        ((None, 1536, 1536), None),  # 768, just wide enough
        ((5472, 1536, 1536), None),  # 5461.3 rows would be enough
        (
            (5456, 1536, 1536),
            "its 5456 rows of 1536 -> 1536 are fewer than min_size 4194304 asks: launching would cost more",
        ),
        ((2048, 8192, 10), "its 10 outputs are not a multiple of 16"),
        ((2048, 1000, 8192), "its 1000 inputs are not a multiple of 16"),
        ((2050, 8192, 8192), "its 2050 rows are not a multiple of 16"),
        ((0, 8192, 8192), "its 0 rows are not a multiple of 16"),
        ((8192, 1024, 1024), "1024 -> 1024 is narrower than min_width 768 asks: converting would cost more"),
        (
            (1008, 8192, 8192),
            "its 1008 rows of 8192 -> 8192 are fewer than min_size 4194304 asks: launching would cost more",
        ),
    ],
)
def test_a_product_that_is_not_worth_it_stays_in_half_and_says_why(
    sizes: tuple[int | None, int, int], reason: str | None
) -> None:
    assert Fp8Recipe().why_half(*sizes) == reason


def test_the_recipe_is_part_of_a_policy_and_of_its_digest() -> None:
    plain, other = Policy.create("O3"), Policy.create("O3", fp8={"gradient": "e4m3"})
    assert plain != other
    assert plain.digest != other.digest
    assert plain.to_dict()["fp8"] == Fp8Recipe().to_dict()
    assert "fp8" not in Policy.create("O2").to_dict()
    assert "fp8: None -> {" in Policy.create("O2").diff(plain)
    assert plain.in_float32().fp8 is None
    with pytest.raises(ValueError, match="level='O3'"):
        Policy.create("O2", fp8=Fp8Recipe())


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[" * 200_000, "deep"),
        ('{"history": 1' + "0" * 400 + "}", "too large"),
        ('{"history": 1000000000000}', "at most 65536"),
        ('{"history": 1e400}', "too large"),
        ('{"gradient": ["e5m2"]}', "unknown gradient"),
        ('{"__class__": 1}', "unknown setting"),
        ("3", "object of settings"),
    ],
)
def test_a_recipe_of_a_saved_program_that_is_none_is_one_line(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word) as caught:
        recipe_from_text(text)
    assert "\n" not in str(caught.value)

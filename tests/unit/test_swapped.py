from __future__ import annotations

from shardkit.engines import registry
from shardkit.engines.swapped import with_backend, words
from shardkit.recipe.load import load

CAP = "backend.options.bucket_cap_mb=3"


def options(override: str, name: str, **more: bool) -> dict[str, object]:
    loaded = load("digits-resnet", [override], options_of=registry.options_of)
    return dict(with_backend(loaded, name, **more).recipe.backend.options)


def test_an_option_that_names_no_backend_is_for_all() -> None:
    assert options(CAP, "fsdp2")["bucket_cap_mb"] == 3  # and is refused later
    assert options(f"{CAP} ", "fsdp2", where_known=True).keys() == {"reshard_after_forward"}
    assert options("backend.options={bucket_cap_mb: 3}", "fsdp2")["bucket_cap_mb"] == 3


def test_options_beside_an_adapter_are_that_adapters() -> None:
    override = "backend={adapter: fsdp2, options: {reshard_after_forward: false}}"
    assert options(override, "ddp") == options("seed=1", "ddp")


def test_words_put_a_recipe_on_a_backend_as_a_plan_does() -> None:
    for override in (CAP, "backend.options={bucket_cap_mb: 3}", "seed=1"):
        loaded = load("digits-resnet", [override], options_of=registry.options_of)
        assert words(loaded, loaded.recipe.backend.name) == []
        for name in ("single", "fsdp2", "hsdp", "accelerate-ddp"):
            more = words(loaded, name)
            again = load("digits-resnet", [override, *more], options_of=registry.options_of)
            assert again.recipe == with_backend(loaded, name, where_known=True).recipe, (override, name)
    loaded = load("digits-resnet", [CAP], options_of=registry.options_of)
    assert words(loaded, "accelerate-ddp") == ["backend=accelerate-ddp", f"{CAP}.0"]

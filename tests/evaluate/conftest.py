"""The tiny model of the tests of the mathematics."""

from tests.core.conftest import (  # noqa: F401, fixtures are found by name
    architecture,
    made_tokens,
    micro_batches,
    model,
    new_model,
    shape,
)

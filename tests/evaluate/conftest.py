"""The tiny model of the tests of the mathematics."""

from tests.core.conftest import (  # noqa: F401, fixtures are found by name
    made_tokens,
    micro_batches,
    model,
    new_model,
    shape,
)

from tests.faults.conftest import gate, start  # noqa: F401, pytest finds fixtures by name

from collections.abc import Callable
from typing import Any

def once_differentiable(function: Callable[..., Any]) -> Callable[..., Any]: ...

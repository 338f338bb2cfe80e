from typing import Any

graph: Any

class Function:
    @classmethod
    def apply(cls, *arguments: Any, **settings: Any) -> Any: ...

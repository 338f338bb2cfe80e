from typing import Any

forward_ad: Any
graph: Any

class Function:
    @classmethod
    def apply(cls, *arguments: Any, **settings: Any) -> Any: ...

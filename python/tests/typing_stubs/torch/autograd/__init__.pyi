from typing import Any

class Function:
    @classmethod
    def apply(cls, *arguments: Any, **settings: Any) -> Any: ...

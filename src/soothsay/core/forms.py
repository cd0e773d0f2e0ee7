"""Values that sets of kernels read in forms of their own."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

Form = TypeVar("Form")
P = ParamSpec("P")


class HasForms:
    """A value that all layers of a pass share, with what kernels made of it."""

    @cached_property
    def _forms(self) -> dict[Any, Any]:
        return {}

    def form(self, make: Callable[Concatenate[Self, P], Form], *args: P.args, **kwargs: P.kwargs) -> Form:
        """What `make` makes of this value. It is made once for the same arguments."""
        key = make, *args
        if key not in self._forms:
            self._forms[key] = make(self, *args, **kwargs)
        form: Form = self._forms[key]
        return form

"""Replaces functions for the length of a block, so that what is measured carries no measuring code.

    with wrapped([(engine, "all_to_all", timed)]):
        train_step(...)                     # calls timed(engine.all_to_all) where it calls engine.all_to_all

A function is replaced where it is looked up: in the module that imported it, in the class of a method, or on one object.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

Wrapper = Callable[[Callable], Callable]


@contextmanager
def wrapped(targets: list[tuple[object, str, Wrapper]]) -> Iterator[None]:
    """Each target `(owner, name, wrapper)`: `owner.name` is `wrapper(owner.name)` inside. The same name may come several times."""
    with ExitStack() as undo:
        for owner, name, wrapper in targets:
            original = getattr(owner, name)
            if name in vars(owner):
                undo.callback(setattr, owner, name, original)
            else:
                undo.callback(delattr, owner, name)
            setattr(owner, name, wrapper(original))
        yield

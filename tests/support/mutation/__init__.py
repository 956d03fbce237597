"""Faults in Python sources, put in by way of the syntax tree.

A fault names the function it is in, and describes a place in it: the call of a name, the condition
or the operand that contains a name, an argument of a call. No text of the source and no line number
is part of it, so neither formatting nor comments nor the order of functions matter; names are whole
words, so that a script that renames an identifier in all files renames it here.
"""

from support.mutation.changes import (
    becomes,
    calling,
    dropped,
    never,
    stripped,
    swapped_with_next,
)
from support.mutation.fault import Edit, Fault
from support.mutation.places import NoSuchPlace, Place, at
from support.mutation.tree import Seat, Tree

__all__ = [
    "Edit",
    "Fault",
    "NoSuchPlace",
    "Place",
    "Seat",
    "Tree",
    "at",
    "becomes",
    "calling",
    "dropped",
    "never",
    "stripped",
    "swapped_with_next",
]

# SPDX-License-Identifier: Apache-2.0
"""Reads a compiled HLO module: which instructions run on the chip, how often, over which bytes.

Only scheduled instructions are returned: those of the entry computation and of the loops,
conditionals and calls that it reaches. Instructions inside a fusion are part of the fusion.
Bytes count the operands and results that lie in HBM once each, padded to the tiles of their
layout (a 64-wide bf16 array occupies 128 lanes); an instruction that reads an operand in part
or twice moves less or more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# Bits of an element; narrower than a byte is packed.
_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16,
    "bf16": 16, "f16": 16, "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64,
    "c64": 64, "f8e4m3fn": 8, "f8e5m2": 8, "f8e4m3b11fnuz": 8,
}  # fmt: skip
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,]*)\](?:\{([^{}]*)\})?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([^\s=]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
# An attribute that the printer spreads over lines, e.g. kernel_metadata={ "xprof_metadata":"..." }.
_BROKEN_ATTRIBUTE = re.compile(r"\{\n(\"[^\n]*)\n\}")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
# Bookkeeping that issues no work of its own.
_FREE = frozenset(
    [
        "parameter",
        "constant",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "add-dependency",
    ]
)


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One HLO instruction as printed."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    def attribute(self, pattern: str) -> str | None:
        """First group of `pattern` in the attributes, None where it does not occur."""
        match = re.search(pattern, self.attributes)
        return match.group(1) if match else None

    def required(self, pattern: str) -> str:
        """The same for what the opcode always has. Raises ValueError where it is missing."""
        value = self.attribute(pattern)
        if value is None:
            raise ValueError(f"hlo instruction %{self.name} ({self.opcode}) lacks {pattern!r}")
        return value


@dataclass(frozen=True, kw_only=True)
class Work:
    """A scheduled instruction and how often one call of the program runs it (None: unknown).

    fused holds the opcodes inside a fusion, parameters and constants left out.
    """

    instruction: Instruction
    executions: int | None
    hbm_bytes: int
    fused: frozenset[str] = frozenset()


class HloModule:
    """The computations of a compiled module, by name, from `compiled.as_text()`."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        self._shapes: dict[str, str] = {}
        current: list[Instruction] | None = None
        for line in _BROKEN_ATTRIBUTE.sub(r"{\1}", text).splitlines():
            header = _COMPUTATION.match(line)
            if header:
                current = self.computations.setdefault(header.group(2), [])
                self.entry = header.group(2) if header.group(1) else self.entry
            elif line.startswith("}"):
                current = None
            elif current is not None and (match := _INSTRUCTION.match(line)):
                instruction = _parse_instruction(match)
                current.append(instruction)
                self._shapes[instruction.name] = instruction.shape
        if not self.entry:
            raise ValueError("hlo text has no ENTRY computation: pass compiled.as_text().")

    def work(self) -> list[Work]:
        """Every scheduled instruction that does work, in program order."""
        return list(self._walk(self.entry, 1))

    def hbm_bytes(self, instruction: Instruction) -> int:
        """Padded bytes in HBM of the instruction's operands and results.

        An asynchronous transfer counts at its start, whose result names both ends.
        """
        if instruction.opcode.endswith("-done"):
            return 0
        if instruction.opcode.endswith("-start"):
            return hbm_bytes(instruction.shape)
        shapes = [self._shapes.get(name, "") for name in dict.fromkeys(instruction.operands)]
        return sum(map(hbm_bytes, [*shapes, instruction.shape]))

    def _walk(self, computation: str, executions: int | None) -> Iterator[Work]:
        for instruction in self.computations[computation]:
            opcode = instruction.opcode
            if opcode == "while":
                trips = self._while_trips(computation, instruction)
                body = instruction.required(r"body=%([^,\s]+)")
                condition = instruction.required(r"condition=%([^,\s]+)")
                yield from self._walk(condition, _times(executions, trips, extra=1))
                yield from self._walk(body, _times(executions, trips))
            elif opcode == "conditional":
                for branch in _branches(instruction):
                    yield from self._walk(branch, None)
            elif opcode == "call":
                yield from self._walk(instruction.required(r"to_apply=%([^,\s]+)"), executions)
            elif opcode not in _FREE:
                yield Work(
                    instruction=instruction,
                    executions=executions,
                    hbm_bytes=self.hbm_bytes(instruction),
                    fused=self._fused_opcodes(instruction),
                )

    def _fused_opcodes(self, instruction: Instruction) -> frozenset[str]:
        if instruction.opcode != "fusion":
            return frozenset()
        opcodes: set[str] = set()
        for item in self.computations[instruction.required(r"calls=%([^,\s]+)")]:
            opcodes |= {item.opcode} | self._fused_opcodes(item)
        return frozenset(opcodes - _FREE - {"fusion"})

    def _while_trips(self, computation: str, loop: Instruction) -> int | None:
        """Trips of a loop `for (i = a; i < n; i += s)` with literal a, n and s, else None."""
        known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
        if known:
            return int(known)
        condition = self._by_name(loop.required(r"condition=%([^,\s]+)"))
        body = self._by_name(loop.required(r"body=%([^,\s]+)"))
        test = next(item for item in condition.values() if item.is_root)
        if test.opcode != "compare" or "direction=LT" not in test.attributes:
            return None
        index = _tuple_index(condition.get(test.operands[0]), condition)
        limit = _literal(condition.get(test.operands[1]), condition)
        if index is None or limit is None:
            return None
        outer = self._by_name(computation)
        start = outer.get(loop.operands[0])
        first = _literal(_element(start, index, outer), outer)
        step = _literal_step(
            body, index, lambda other: _literal(_element(start, other, outer), outer)
        )
        if first is None or step is None or step <= 0:
            return None
        return max(0, -(-(limit - first) // step))

    def _by_name(self, computation: str) -> dict[str, Instruction]:
        return {item.name: item for item in self.computations[computation]}


def _parse_instruction(match: re.Match) -> Instruction:
    root, name, rest = match.groups()
    shape, rest = _take_shape(rest)
    opcode = _OPCODE.match(rest)
    if opcode is None:
        raise ValueError(f"hlo instruction %{name}: no opcode after its shape in {rest[:80]!r}")
    arguments, attributes = _take_parenthesis(rest[opcode.end() - 1 :])
    is_literal = opcode.group(1) in ("constant", "parameter")
    operands = () if is_literal else tuple(re.findall(r"%([^\s,()]+)", arguments))
    return Instruction(
        name=name,
        shape=shape,
        opcode=opcode.group(1),
        operands=operands,
        attributes=f"literal={arguments} {attributes}" if is_literal else attributes,
        is_root=root is not None,
    )


def _take_shape(rest: str) -> tuple[str, str]:
    """Splits "SHAPE opcode(...)": a tuple shape is one parenthesis, an array has no space."""
    if rest.startswith("("):
        inside, after = _take_parenthesis(rest)
        return f"({inside})", after
    shape, _, after = rest.partition(" ")
    return shape, " " + after


def _take_parenthesis(text: str) -> tuple[str, str]:
    """Splits "(inside)after" at the parenthesis that closes the first one."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[1:index], text[index + 1 :]
    raise ValueError(f"hlo text: unbalanced parenthesis in {text[:80]!r}")


def hbm_bytes(shape: str) -> int:
    """Padded bytes of the arrays of `shape` that lie in HBM (memory space 0, the default)."""
    return sum(
        _padded_bytes(kind, dimensions, layout or "")
        for kind, dimensions, layout in _ARRAY.findall(re.sub(r"/\*.*?\*/", "", shape))
        if kind in _BITS and not re.search(r"S\([1-9]", layout or "")
    )


def _padded_bytes(kind: str, dimensions: str, layout: str) -> int:
    sizes = [int(size) for size in dimensions.split(",") if size]
    order, _, tiling = layout.partition(":")
    minor_to_major = [int(axis) for axis in order.split(",") if axis] or list(
        reversed(range(len(sizes)))
    )
    tile = re.match(r"T\(([0-9,]+)\)", tiling)
    tile_sizes = [int(size) for size in tile.group(1).split(",")] if tile else []
    padded = [sizes[axis] for axis in minor_to_major]
    for position, tile_size in enumerate(reversed(tile_sizes)):
        if position < len(padded):
            padded[position] = -(-padded[position] // tile_size) * tile_size
    elements = 1
    for size in padded:
        elements *= size
    return elements * _BITS[kind] // 8


def _times(executions: int | None, trips: int | None, *, extra: int = 0) -> int | None:
    return None if executions is None or trips is None else executions * (trips + extra)


def _branches(instruction: Instruction) -> list[str]:
    listed = instruction.attribute(r"branch_computations=\{([^}]*)\}")
    if listed:
        return [name.strip().lstrip("%") for name in listed.split(",")]
    return re.findall(r"(?:true|false)_computation=%([^,\s]+)", instruction.attributes)


def _through_copies(
    instruction: Instruction | None, scope: dict[str, Instruction]
) -> Instruction | None:
    """What a chain of copies and bitcasts copies."""
    while instruction is not None and instruction.opcode in ("copy", "bitcast"):
        instruction = scope.get(instruction.operands[0])
    return instruction


def _tuple_index(instruction: Instruction | None, scope: dict[str, Instruction]) -> int | None:
    """Which element of a tuple this is; None for anything else."""
    instruction = _through_copies(instruction, scope)
    if instruction is None or instruction.opcode != "get-tuple-element":
        return None
    index = instruction.attribute(r"index=(\d+)")
    return int(index) if index else None


def _element(
    instruction: Instruction | None, index: int, scope: dict[str, Instruction]
) -> Instruction | None:
    if instruction is None or instruction.opcode != "tuple":
        return None
    return scope.get(instruction.operands[index])


def _literal(instruction: Instruction | None, scope: dict[str, Instruction]) -> int | None:
    """The integer a scalar constant holds; None for anything else."""
    instruction = _through_copies(instruction, scope)
    if instruction is None or instruction.opcode != "constant":
        return None
    value = instruction.attribute(r"literal=(-?\d+)(?:\s|$)")
    return int(value) if value else None


def _literal_step(
    body: dict[str, Instruction], index: int, initial: Callable[[int], int | None]
) -> int | None:
    """What one iteration adds to element `index` of the loop's tuple, None unless a literal.

    The compiler may carry the step as another element that no iteration changes; initial(i) is
    the literal that element i starts from.
    """
    root = next(item for item in body.values() if item.is_root)
    update = _element(root, index, body)
    if update is None or update.opcode != "add":
        return None
    operands = [body.get(name) for name in update.operands]
    indices = [_tuple_index(item, body) for item in operands]
    if index not in indices:
        return None
    position = 1 - indices.index(index)
    carried = indices[position]
    if carried is not None:
        unchanged = _tuple_index(_element(root, carried, body), body) == carried
        return initial(carried) if unchanged else None
    return _literal(operands[position], body)

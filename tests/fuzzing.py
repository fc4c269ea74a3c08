"""Seeded mutations of valid files: values of wrong types and sizes, damaged bytes."""

import copy
import json
import random

DEEP = "[" * 100_000
# Values that no recipe expects anywhere. Numbers with 400 digits are beyond a float, 30 digits beyond 64 bits.
ODD_VALUES = [
    None,
    True,
    False,
    -1,
    0,
    3.5,
    10**30,
    10**400,
    1e308,
    float("nan"),
    float("-inf"),
    "",
    " ",
    "\0",
    "\ud800",
    "x",
] + [
    [],
    {},
    [None],
    [[]],
    {"a": None},
    {"0": 1},
    "1",
    "None",
    ["system"],
    [{"role": 1}],
    "x" * 10_000,
    {"": {}},
    [1, "a"],
]


def places(value, path=()):
    """Yields the path of a JSON value and those of all values inside it."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def mutate_value(value, rng):
    """Returns a JSON value in which one value is odd, missing, wrapped, moved or repeated."""
    value = copy.deepcopy(value)
    *_, path = [()] + rng.sample(list(places(value)), 1)
    if not path:
        return rng.choice(ODD_VALUES)
    *outer, last = path
    holder = value
    for key in outer:
        holder = holder[key]
    kind = rng.randrange(6)
    if kind == 0:
        del holder[last]
    elif kind == 1:
        holder[last] = [holder[last]]
    elif kind == 2:
        holder[last] = {"value": holder[last]}
    elif kind == 3:
        holder[last] = str(holder[last])
    else:
        holder[last] = rng.choice(ODD_VALUES)
    return value


def mutate_bytes(data, rng):
    """Returns damaged bytes: truncated, with other bytes inside, in a different encoding, or nested too deep."""
    at = rng.randrange(len(data) + 1)
    kinds = [
        lambda: data[:at],
        lambda: data[at:],
        lambda: data[:at] + b"\0" + data[at:],
        lambda: data[:at] + b"\xff\xfe\x80" + data[at:],
        lambda: data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
        lambda: data[:at] + rng.randbytes(rng.randrange(1, 40)) + data[at:],
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data.decode("latin-1").encode("utf-16"),
        lambda: data[:at] + DEEP.encode() + data[at:],
        lambda: data[:at] + b'"' + data[at:],
        lambda: data + data[:at],
        lambda: data.replace(b"\n", b"\r"),
        lambda: b"",
    ]
    return rng.choice(kinds)()


def mutants(rows, number, seed, write=None):
    """Yields `number` mutants of a list of JSON rows as bytes of JSON Lines, half of them damaged as bytes.

    write: turns a list of rows into bytes; JSON Lines by default.
    """
    rng = random.Random(seed)
    write = write or (lambda rows: "".join(json.dumps(row) + "\n" for row in rows).encode())
    for index in range(number):
        if index % 2:
            yield mutate_bytes(write(rows), rng)
        else:
            changed = list(rows)
            at = rng.randrange(len(rows))
            changed[at] = mutate_value(rows[at], rng)
            yield write(changed)

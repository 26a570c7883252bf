"""PostgreSQL's operators and functions that have a rule: oid → signature.

Built-in oids are the same in every database and version. Tests compare each with a server's catalogs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

Signature: TypeAlias = tuple[str, ...]
"""An operator's symbol or a function's name, and its argument types: `("<", "int4", "int8")`."""

COMPARISON_SYMBOLS: Final = ("=", "<>", "<", "<=", ">", ">=")

_COMPARISONS: Final[Mapping[tuple[str, str], tuple[int, ...]]] = {
    ("int2", "int2"): (94, 519, 95, 522, 520, 524),
    ("int2", "int4"): (532, 538, 534, 540, 536, 542),
    ("int2", "int8"): (1862, 1863, 1864, 1866, 1865, 1867),
    ("int4", "int2"): (533, 539, 535, 541, 537, 543),
    ("int4", "int4"): (96, 518, 97, 523, 521, 525),
    ("int4", "int8"): (15, 36, 37, 80, 76, 82),
    ("int8", "int2"): (1868, 1869, 1870, 1872, 1871, 1873),
    ("int8", "int4"): (416, 417, 418, 420, 419, 430),
    ("int8", "int8"): (410, 411, 412, 414, 413, 415),
    ("oid", "oid"): (607, 608, 609, 611, 610, 612),
    ("bool", "bool"): (91, 85, 58, 1694, 59, 1695),
    ("numeric", "numeric"): (1752, 1753, 1754, 1755, 1756, 1757),
    ("float4", "float4"): (620, 621, 622, 624, 623, 625),
    ("float4", "float8"): (1120, 1121, 1122, 1124, 1123, 1125),
    ("float8", "float4"): (1130, 1131, 1132, 1134, 1133, 1135),
    ("float8", "float8"): (670, 671, 672, 673, 674, 675),
    ("uuid", "uuid"): (2972, 2973, 2974, 2976, 2975, 2977),
    ("bytea", "bytea"): (1955, 1956, 1957, 1958, 1959, 1960),
    ("date", "date"): (1093, 1094, 1095, 1096, 1097, 1098),
    ("date", "timestamp"): (2347, 2350, 2345, 2346, 2349, 2348),
    ("timestamp", "date"): (2373, 2376, 2371, 2372, 2375, 2374),
    ("timestamp", "timestamp"): (2060, 2061, 2062, 2063, 2064, 2065),
    ("timestamptz", "timestamptz"): (1320, 1321, 1322, 1323, 1324, 1325),
    ("time", "time"): (1108, 1109, 1110, 1111, 1112, 1113),
    ("timetz", "timetz"): (1550, 1551, 1552, 1553, 1554, 1555),
    ("interval", "interval"): (1330, 1331, 1332, 1333, 1334, 1335),
    ("text", "text"): (98, 531, 664, 665, 666, 667),
    ("bpchar", "bpchar"): (1054, 1057, 1058, 1059, 1060, 1061),
    ("name", "name"): (93, 643, 660, 661, 662, 663),
    ("char", "char"): (92, 630, 631, 632, 633, 634),
    ("money", "money"): (900, 901, 902, 904, 903, 905),
    ("inet", "inet"): (1201, 1202, 1203, 1204, 1205, 1206),
    ("jsonb", "jsonb"): (3240, 3241, 3242, 3244, 3243, 3245),
}
"""The oids of `COMPARISON_SYMBOLS`, in that order."""

_OTHER_OPERATORS: Final[Mapping[tuple[str, ...], Mapping[str, int]]] = {
    ("int2",): {"-": 559, "~": 1877},
    ("int4",): {"-": 558, "~": 1883},
    ("int8",): {"-": 484, "~": 1889},
    ("int2", "int2"): {"+": 550, "-": 554, "*": 526, "/": 527, "%": 529, "&": 1874, "|": 1875, "#": 1876},
    ("int2", "int4"): {"+": 552, "-": 556, "*": 544, "/": 546},
    ("int2", "int8"): {"+": 822, "-": 823, "*": 824, "/": 825},
    ("int4", "int2"): {"+": 553, "-": 557, "*": 545, "/": 547},
    ("int4", "int4"): {"+": 551, "-": 555, "*": 514, "/": 528, "%": 530, "&": 1880, "|": 1881, "#": 1882},
    ("int4", "int8"): {"+": 692, "-": 693, "*": 694, "/": 695},
    ("int8", "int2"): {"+": 818, "-": 819, "*": 820, "/": 821},
    ("int8", "int4"): {"+": 688, "-": 689, "*": 690, "/": 691},
    ("int8", "int8"): {"+": 684, "-": 685, "*": 686, "/": 687, "%": 439, "&": 1886, "|": 1887, "#": 1888},
    ("numeric", "numeric"): {"+": 1758, "-": 1759, "*": 1760, "/": 1761, "%": 1762},
    ("float8", "float8"): {"+": 591, "-": 592, "*": 594, "/": 593},
    ("text", "text"): {
        "||": 654, "~~": 1209, "!~~": 1210, "^@": 3877,
        "~~*": 1627, "!~~*": 1628, "~": 641, "!~": 642, "~*": 1228, "!~*": 1229,
    },
    ("jsonb", "jsonb"): {"@>": 3246, "<@": 3250},
    ("jsonb", "text"): {"->": 3211, "->>": 3477, "?": 3247},
    ("json", "text"): {"->": 3962, "->>": 3963},
    ("anyarray", "anyarray"): {"@>": 2751, "<@": 2752, "&&": 2750, "=": 1070},
    ("bpchar", "text"): {
        "~~": 1211, "!~~": 1212, "~~*": 1629, "!~~*": 1630, "~": 1055, "!~": 1056, "~*": 1234, "!~*": 1235
    },
}  # fmt: skip

OPERATORS: Final[Mapping[int, Signature]] = {
    oid: (symbol, *types)
    for types, oids in _COMPARISONS.items()
    for symbol, oid in zip(COMPARISON_SYMBOLS, oids, strict=True)
} | {oid: (symbol, *types) for types, oids in _OTHER_OPERATORS.items() for symbol, oid in oids.items()}
"""`pg_operator.oid` → signature, for the operators that have a rule."""

FUNCTIONS: Final[Mapping[int, Signature]] = {
    313: ("int4", "int2"),
    754: ("int8", "int2"),
    481: ("int8", "int4"),
    314: ("int2", "int4"),
    714: ("int2", "int8"),
    480: ("int4", "int8"),
    1287: ("oid", "int8"),
    1288: ("int8", "oid"),
    1782: ("numeric", "int2"),
    1740: ("numeric", "int4"),
    1781: ("numeric", "int8"),
    236: ("float4", "int2"),
    318: ("float4", "int4"),
    652: ("float4", "int8"),
    235: ("float8", "int2"),
    316: ("float8", "int4"),
    482: ("float8", "int8"),
    311: ("float8", "float4"),
    1746: ("float8", "numeric"),
    1745: ("float4", "numeric"),
    401: ("text", "bpchar"),
    2029: ("date", "timestamp"),
    1703: ("numeric", "numeric", "int4"),
    668: ("bpchar", "bpchar", "int4", "bool"),
    669: ("varchar", "varchar", "int4", "bool"),
    940: ("mod", "int2", "int2"),
    941: ("mod", "int4", "int4"),
    947: ("mod", "int8", "int8"),
    3696: ("starts_with", "text", "text"),
    870: ("lower", "text"),
    871: ("upper", "text"),
    1317: ("length", "text"),
    936: ("substring", "text", "int4", "int4"),
    937: ("substring", "text", "int4"),
    2311: ("md5", "text"),
    400: ("hashtext", "text"),
    1398: ("abs", "int2"),
    1397: ("abs", "int4"),
    1396: ("abs", "int8"),
    2020: ("date_trunc", "text", "timestamp"),
    6199: ("extract", "text", "date"),
    6202: ("extract", "text", "timestamp"),
}
"""`pg_proc.oid` → signature, for the functions that have a rule; a cast has the name of its target type."""

OPERATOR_OIDS: Final[Mapping[Signature, int]] = {signature: oid for oid, signature in OPERATORS.items()}

"""Architecture specs: the single source of truth for what a CPU level or a GPU can do.

The data are JSON files under ``specs/``; adding an architecture is adding a file. Nothing is
read at import. See ``docs/adding-an-arch.md``.
"""

from .detect import detect_cpu
from .errors import (
    ArchError,
    SpecError,
    UnknownArchError,
    UnknownFeatureError,
    UnknownNameError,
    UnknownPipelineError,
    UnsupportedDeviceError,
)
from .frozen import FrozenMap
from .loader import from_compute_capability, from_gcn_arch_name, load, names, parse_spec
from .rates import MatrixRate, Rates
from .spec import (
    ArchSpec,
    BulkCopy,
    Caches,
    Feature,
    Instruction,
    Match,
    Pipeline,
    RegisterSplit,
    Throughput,
    TileTable,
    Toolchain,
    Trait,
    Triple,
)
from .validate import schema, validate_spec

__all__ = [
    "ArchError",
    "ArchSpec",
    "BulkCopy",
    "Caches",
    "Feature",
    "FrozenMap",
    "Instruction",
    "Match",
    "MatrixRate",
    "Pipeline",
    "Rates",
    "RegisterSplit",
    "SpecError",
    "Throughput",
    "TileTable",
    "Toolchain",
    "Trait",
    "Triple",
    "UnknownArchError",
    "UnknownFeatureError",
    "UnknownNameError",
    "UnknownPipelineError",
    "UnsupportedDeviceError",
    "detect_cpu",
    "from_compute_capability",
    "from_gcn_arch_name",
    "load",
    "names",
    "parse_spec",
    "schema",
    "validate_spec",
]

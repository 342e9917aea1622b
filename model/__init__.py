"""A resident DeepSeek-V2/V3 model whose weights can be kept current, tensor by tensor, in any order."""

from .config import DeepseekV2Config, Fp8, RopeScaling
from .errors import (
    ConfigError,
    ConflictError,
    FusionCacheFull,
    NotReadyError,
    Offender,
    StaleError,
    WeightsError,
)
from .finite import NotFinite, all_finite
from .fusion import ExpiredHalf, FusionCache, PendingHalf
from .generation import TORCH_DTYPES, Generation, Stamp
from .leases import Leases
from .loading import Destination, LoadReport, Update
from .modeling import Canary, DeepseekV2ForCausalLM, Lease
from .names import Group, LoadPlan, ParameterSpec, Slot, SlotTable, TensorMeta
from .staging import Carried, Staging, StagingError

__all__ = [
    "TORCH_DTYPES",
    "Canary",
    "Carried",
    "ConfigError",
    "ConflictError",
    "DeepseekV2Config",
    "DeepseekV2ForCausalLM",
    "Destination",
    "ExpiredHalf",
    "Fp8",
    "FusionCache",
    "FusionCacheFull",
    "Generation",
    "Group",
    "Lease",
    "Leases",
    "LoadPlan",
    "LoadReport",
    "NotFinite",
    "NotReadyError",
    "Offender",
    "ParameterSpec",
    "PendingHalf",
    "RopeScaling",
    "Slot",
    "SlotTable",
    "Staging",
    "StagingError",
    "StaleError",
    "Stamp",
    "TensorMeta",
    "Update",
    "WeightsError",
    "all_finite",
]

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
from .fusion import ExpiredHalf, FusionCache, PendingHalf
from .generation import TORCH_DTYPES, Generation, Stamp
from .loading import Destination, LoadReport, Update
from .modeling import DeepseekV2ForCausalLM
from .names import Group, LoadPlan, ParameterSpec, Slot, SlotTable, TensorMeta

__all__ = [
    "TORCH_DTYPES",
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
    "LoadPlan",
    "LoadReport",
    "NotReadyError",
    "Offender",
    "ParameterSpec",
    "PendingHalf",
    "RopeScaling",
    "Slot",
    "SlotTable",
    "StaleError",
    "Stamp",
    "TensorMeta",
    "Update",
    "WeightsError",
]

"""A precision policy: which dtype is used where, and by what the loss is scaled."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from ringlet.precision import appliers
from ringlet.precision.scaler import LossScale, NoScale

M = TypeVar("M")

DTYPES = ("float32", "bfloat16", "float16")
REDUCTIONS = ("float32", "wire")
# Norms divide by small numbers, biases are tiny, and rows of embeddings are seldom updated.
NORMS = ("*norm*", "*Norm*", "*.bn*", "bn*", "*.ln*", "ln*")
BIASES = ("bias", "*.bias", "*_bias", "*.bias_[ih]h_l*")
EMBEDDINGS = ("*Embedding*", "*embedding*", "*pos_embed*")
KEPT = (*NORMS, *BIASES, *EMBEDDINGS)


@dataclass(frozen=True)
class Policy:
    """Dtypes by name, layers that stay in float32, the default wire, and the loss scale.

    - ``parameters``: what the model holds. Where that is a 16-bit type, the optimizer works on
      float32 masters.
    - ``compression``: the spec used unless the caller names one.
    - ``keep``: patterns of parameters' names, or of the classes of the layers that own them, that
      stay in float32, beside all norm layers.
    - ``scale``: the loss scale.
    - ``compute``: what layers compute in: by default what ``parameters`` is. Where parameters are
      float32 and this is not, layers cast as they go (autocast).
    - ``reduction``: "float32" accumulates sums over ranks in float32 even where 16 bits travel;
      "wire" leaves sums of 16-bit values to the transport, which may round at every hop.

    Raises ValueError for dtypes that are none of these, or do not go together.
    """

    name: str
    parameters: str = "float32"
    compression: str = "none"
    keep: tuple[str, ...] = KEPT
    scale: LossScale = field(default_factory=NoScale)
    compute: str = ""
    reduction: str = "float32"

    def __post_init__(self) -> None:
        plain: dict[str, Any] = self.__dict__
        plain["compute"] = self.compute or self.parameters
        keep = plain["keep"]
        if isinstance(keep, str):
            raise ValueError(f"policy {self.name!r}: keep is a tuple of patterns: ({keep!r},)")
        plain["keep"] = tuple(keep)
        for what in ("parameters", "compute"):
            self._one_of(what, DTYPES)
        self._one_of("reduction", REDUCTIONS)
        if self.masters and self.compute != self.parameters:
            raise ValueError(
                f"policy {self.name!r}: {self.parameters} parameters compute in "
                f"{self.parameters}, not {self.compute}; float32 parameters compute in any dtype"
            )

    def _one_of(self, what: str, known: tuple[str, ...]) -> None:
        value = getattr(self, what)
        if value not in known:
            hint = ""
            if "8" in str(value):
                hint = ". 8-bit floats can travel, whatever torch knows of: take 'fp8_wire'"
            raise ValueError(
                f"policy {self.name!r}: {what} must be one of {', '.join(known)}, not "
                f"{value!r}{hint}"
            )

    @property
    def masters(self) -> bool:
        """Whether the optimizer works on float32 copies of the parameters."""
        return self.parameters != "float32"

    @property
    def autocasts(self) -> bool:
        """Whether float32 parameters are cast where layers compute."""
        return self.compute != self.parameters

    def keeps(self, name: str, layer: str = "") -> bool:
        """Whether the parameter ``name``, of a layer of the class ``layer``, stays in float32."""
        return any(fnmatchcase(name, p) or fnmatchcase(layer, p) for p in self.keep)

    def apply(self, model: M) -> M:
        """Give a torch module or a Keras model this policy's dtypes, in place, and return it.

        See ``ringlet.torch.apply_precision`` and ``ringlet.keras.apply_precision``. TypeError for a
        model of another framework.
        """
        if not appliers.apply(model, self):
            raise TypeError(
                "a policy is applied to a torch.nn.Module or a Keras model, not "
                f"{type(model).__name__}"
            )
        return model

    def autocast(self, device: str | None = None) -> AbstractContextManager[Any]:
        """Return a context in which torch computes in ``compute`` on ``device``.

        ``device`` is a type such as "cuda": by default that of the accelerator, if there is one.
        Models that were given the policy need none; code beside them may. A policy whose parameters
        are of the dtype already does nothing here.
        """
        if not self.autocasts:
            return nullcontext()
        return appliers.autocast(self.compute, device)

    def keras_dtype(self) -> str:
        """Return Keras' name for this policy's dtypes: its variables are float32 masters."""
        return "float32" if self.compute == "float32" else f"mixed_{self.compute}"

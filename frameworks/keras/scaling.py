"""A loss scale within bounds, or a fixed one, in a Keras LossScaleOptimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import keras

from ringlet.keras import backends
from ringlet.precision import DynamicScale, LossScale, Policy, StaticScale

_DYNAMIC = DynamicScale()


# The name under which it is saved: a model that has one needs Ringlet to be loaded.
@keras.saving.register_keras_serializable("ringlet")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Keras' LossScaleOptimizer with a choice of how the loss scale moves.

    Keras' own doubles after ``dynamic_growth_steps`` steps without overflow and halves at each
    overflow, without end. This one multiplies by ``growth`` and by ``backoff``, and stays between
    ``least`` and ``most``. Where both factors are 1 the scale is fixed. Steps that overflow are
    skipped in any case; ``skipped_steps`` (an integer variable, once built) counts them.

    Saved with the model are the scale, the steps since it moved, and ``skipped_steps``. Raises
    ValueError for factors or bounds that make no loss scale, as ``DynamicScale`` does.
    """

    built: bool

    def __init__(
        self,
        inner_optimizer: Any,
        initial_scale: float = _DYNAMIC.scale,
        dynamic_growth_steps: int = _DYNAMIC.interval,
        growth: float = _DYNAMIC.growth,
        backoff: float = _DYNAMIC.backoff,
        least: float = _DYNAMIC.least,
        most: float = _DYNAMIC.most,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if growth == backoff == 1:
            StaticScale(initial_scale)
            least = most = initial_scale
        else:
            DynamicScale(initial_scale, growth, backoff, dynamic_growth_steps, least, most)
        super().__init__(inner_optimizer, initial_scale, dynamic_growth_steps, name, **kwargs)
        self.growth, self.backoff = growth, backoff
        self.least, self.most = least, most

    @classmethod
    def following(cls, scale: LossScale, optimizer: Any) -> LossScaleOptimizer:
        """Return ``optimizer`` with a policy's loss scale: a StaticScale or a DynamicScale.

        Raises ValueError for others: theirs is a course that a graph cannot take.
        """
        if type(scale) is StaticScale:
            return cls(optimizer, scale.scale, growth=1.0, backoff=1.0)
        if type(scale) is not DynamicScale:  # a subclass may move as it likes
            raise ValueError(
                f"the loss scale {scale} is no StaticScale and no DynamicScale: Keras moves its "
                "scale inside a graph, which knows these two. Take one of them"
            )
        moves = scale.growth, scale.backoff, scale.least, scale.most
        return cls(optimizer, scale.scale, scale.interval, *moves)

    def build(self, var_list: Any) -> None:
        """Make the variables: Keras' own, the inner optimizer's, and ``skipped_steps``."""
        super().build(var_list)
        self.skipped_steps = self.add_variable(
            shape=(), dtype="int", initializer="zeros", aggregation="none", name="skipped_steps"
        )

    @backends.as_written
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Unscale and apply ``grads``, or skip the step; then move the scale."""
        ops = keras.ops
        given = variables_given(trainable_variables, self.built)
        if not self.built:
            with keras.name_scope(self.name):
                self.build(given)
            self.built = True
        before = ops.copy(self.dynamic_scale)
        super().apply(grads, given)
        # Keras has doubled or halved it, or left it: that tells what has happened.
        grew, overflowed = self.dynamic_scale > before, self.dynamic_scale < before
        wider = ops.minimum(before * self.growth, self.most)
        narrower = ops.maximum(before * self.backoff, self.least)
        now = ops.where(grew, wider, ops.where(overflowed, narrower, before))
        self.dynamic_scale.assign(now)
        self.skipped_steps.assign_add(ops.cast(overflowed, self.skipped_steps.dtype))

    def stateless_apply(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: no backend that Ringlet has an adapter for calls it."""
        raise RuntimeError("Ringlet's LossScaleOptimizer has no stateless_apply; use apply")

    def get_config(self) -> dict[str, Any]:
        """Return the arguments it was made with."""
        moves = {key: getattr(self, key) for key in ("growth", "backoff", "least", "most")}
        return {**super().get_config(), **moves}


def variables_given(variables: Iterable[Any] | None, built: bool) -> list[Any] | None:
    """Return the variables that ``apply`` is given as a list: an iterator serves only once.

    None stands for those of an optimizer that is ``built``. Raises ValueError where it is not:
    Keras would build it for none at all.
    """
    if variables is not None:
        return list(variables)
    if not built:
        raise ValueError(
            "apply(grads) without variables needs an optimizer that is built: call "
            "optimizer.build(trainable_variables) first, or apply(grads, trainable_variables)"
        )
    return None


def with_loss_scale(optimizer: Any, policy: Policy) -> Any:
    """Return ``optimizer``, in a LossScaleOptimizer if the policy has a loss scale and it is none.

    Raises ValueError for scales other than static and dynamic ones.
    """
    if not policy.scale.watches or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer
    return LossScaleOptimizer.following(policy.scale, optimizer)

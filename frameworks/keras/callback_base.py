"""The base of our callbacks, which Keras 3 and tf_keras can both call."""

from __future__ import annotations

import keras


class KerasCallback(keras.callbacks.Callback):
    """A callback of Keras 3 that tells tf_keras, which asks, when it wants to be called."""

    def _implements_train_batch_hooks(self) -> bool:
        kinds = "on_batch", "on_train_batch"
        return self._implements(*kinds)

    def _implements_test_batch_hooks(self) -> bool:
        return self._implements("on_test_batch")

    def _implements_predict_batch_hooks(self) -> bool:
        return self._implements("on_predict_batch")

    def _implements(self, *kinds: str) -> bool:
        """Whether a hook of these kinds is more than the one that both libraries begin with."""
        hooks = [getattr(self, f"{kind}_{end}") for kind in kinds for end in ("begin", "end")]
        return not all(getattr(hook, "_is_default", False) for hook in hooks)

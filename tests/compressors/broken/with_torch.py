"""What belongs to a library that a plugin imports when it is first called."""

from broken.right import Whole


class TurnsGradientsOff(Whole):
    """Computes with PyTorch without gradients, and turns them off for the program as well."""

    def compress(self, x, ctx):
        import torch

        torch.set_grad_enabled(False)
        return super().compress(torch.from_numpy(x.copy()).numpy(), ctx)

"""Which positions of a batch are padding, as the attention_mask said when they came."""

from __future__ import annotations

import torch


class Padding:
    """The padding among a batch's positions. Caches hold real tokens alone; the model counts *positions*, padding included."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._shown = torch.ones(batch, 0, dtype=torch.bool, device="cpu")
        """Which positions are real tokens, on the host, up to the last one at which any sequence has padding."""
        self._real = [0] * batch
        """Real tokens of each sequence among them."""
        self._on_device: torch.Tensor | None = None
        """`_shown` where masks come from; None until a mask came since it last changed."""

    @property
    def end(self) -> int:
        """From this position on no sequence has padding."""
        return self._shown.shape[1]

    def lengths(self, positions: int) -> list[int]:
        """Real tokens of each sequence."""
        return [real + positions - self.end for real in self._real]

    def of_new(self, positions: int, tokens: int, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Which new tokens are real, bool [batch, tokens] on the host; None where all of them are.

        Raises ValueError for a mask of the wrong shape, and where it, or its absence, disagrees with the padding that has come.
        """
        wanted = [self._batch, positions + tokens]
        anew = "another prompt needs cache.reset() first"
        if mask is None:
            if self.end:
                shape = f"give an attention_mask of shape {wanted} that hides it, as when it came"
                raise ValueError(f"past positions hold padding: {shape}; {anew}")
            return None
        if list(mask.shape) != wanted:
            raise ValueError(f"attention_mask must have shape {wanted}, past and new positions, not {list(mask.shape)}; {anew}")
        if self._is_usual(mask):
            return None
        host = mask.bool().cpu()
        self._agrees(host[:, :positions])
        return host[:, positions:]

    def _is_usual(self, mask: torch.Tensor) -> bool:
        """Whether a mask is the known padding with real tokens behind it, as in every step after the prompt.

        It is compared on its own device, and the host waits for one flag: on the flag depends which kernels run.
        """
        if self._on_device is None or self._on_device.device != mask.device:
            self._on_device = self._shown.to(mask.device)
        past, rest = mask[:, : self.end].bool(), mask[:, self.end :]
        return bool((past == self._on_device).all() & rest.all())

    def append(self, positions: int, new: torch.Tensor | None) -> None:
        """Count tokens that `of_new` described, after so many positions."""
        if new is not None:
            known = torch.nn.functional.pad(self._shown, (0, positions - self.end), value=True)
            self._know(torch.cat([known, new], 1))

    def reorder(self, index: torch.Tensor) -> None:
        """Sequence b becomes a copy of sequence `index[b]`."""
        self._know(self._shown[index.cpu()])

    def _know(self, shown: torch.Tensor) -> None:
        """Keep these positions, up to the last one at which any sequence has padding."""
        padded = (~shown).any(0).nonzero().flatten()
        self._shown = shown[:, : int(padded[-1]) + 1 if len(padded) else 0]
        self._real = self._shown.sum(1).tolist()
        self._on_device = None

    def _agrees(self, past: torch.Tensor) -> None:
        wrong = past.clone()
        wrong[:, : self.end] ^= self._shown
        wrong[:, self.end :] ^= True
        if bool(wrong.any()):
            row, position = wrong.nonzero()[0].tolist()
            verb, was = ("shows", "padding") if past[row, position] else ("hides", "a token")
            raise ValueError(
                f"attention_mask {verb} position {position} of sequence {row}, which came as {was}: kvgen drops padding when it is "
                "appended, and cannot hide or show tokens later"
            )

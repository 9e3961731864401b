"""Low-rank adapters as `peft` injects them: a layer that wraps a linear one and holds adapters by name."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


class LoraLinear(torch.nn.Module):
    """`base_layer` plus the active adapters' products, with attributes and parameters as in peft."""

    def __init__(self, base_layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = torch.nn.ModuleDict()
        self.lora_B = torch.nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        self.merged_adapters: list[str] = []
        self._disable_adapters = False
        self._active_adapter: list[str] = []

    def update_layer(self, name: str, rank: int, scaling: float, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        down = torch.nn.Linear(self.base_layer.in_features, rank, bias=False)
        up = torch.nn.Linear(rank, self.base_layer.out_features, bias=False)
        with torch.no_grad():
            for layer in (down, up):
                layer.weight.copy_(torch.empty_like(layer.weight).normal_(std=0.3, generator=rng))
        self.lora_A[name], self.lora_B[name], self.scaling[name] = down, up, scaling
        self._active_adapter = [name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(x)
        for name in () if self._disable_adapters else self._active_adapter:
            out = out + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return out


def layers_of(model: PreTrainedModel) -> list[LoraLinear]:
    return [module for module in model.modules() if isinstance(module, LoraLinear)]


def add_adapter(model: PreTrainedModel, name: str, seed: int, scaling: float = 1.0) -> None:
    """Inject an adapter into every key and value projection, and make it the active one."""
    for parent in list(model.modules()):
        for child in ("k_proj", "v_proj"):
            layer = getattr(parent, child, None)
            if isinstance(layer, torch.nn.Linear):
                setattr(parent, child, layer := LoraLinear(layer))
            if isinstance(layer, LoraLinear):
                layer.update_layer(name, 4, scaling, seed)
    model.train(False)


def disable_adapters(model: PreTrainedModel, disabled: bool = True) -> None:
    for layer in layers_of(model):
        layer._disable_adapters = disabled


def set_adapter(model: PreTrainedModel, name: str) -> None:
    for layer in layers_of(model):
        layer._active_adapter = [name]

"""One model of each module of `timm` and `torchvision`."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch import Tensor, nn

from family import Built, Family, class_loss, image_batch, one_line, output_loss


def define_missing_operators() -> None:
    """torchvision's wheel for CUDA does not load its operators beside a CPU build of torch; its models can be imported if their schemas exist."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for operator in ("nms", "qnms"):
            _LIBRARIES.append(torch.library.Library("torchvision", "FRAGMENT"))
            _LIBRARIES[-1].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_LIBRARIES: list[Any] = []


def timm_families() -> list[Family]:
    """The smallest model of each module of timm."""
    define_missing_operators()
    import timm

    found = []
    for module in timm.list_modules():
        names = timm.list_models(module=module)
        if names:
            found.append(Family("timm", module, lambda names=names: _build_timm(names)))  # type: ignore[misc]
    return found


def _build_timm(names: list[str]) -> Built:
    import timm

    def size_on_meta(name: str) -> int:
        try:
            with torch.device("meta"):
                return sum(p.numel() for p in timm.create_model(name, num_classes=10).parameters())
        except Exception:
            return 10**12

    hints = ("test_", "atto", "femto", "pico", "nano", "tiny", "_t_", "xxs", "_s", "small", "18", "050", "b0")
    candidates = sorted(names, key=lambda n: min((i for i, h in enumerate(hints) if h in n), default=99))[:6]
    name = min(candidates, key=size_on_meta)
    errors = []
    for options in ({"img_size": 64}, {}):
        try:
            torch.manual_seed(0)
            model = timm.create_model(name, num_classes=10, **options)
            size = 64 if options or not getattr(model, "default_cfg", {}).get("fixed_input_size") else model.default_cfg["input_size"][-1]
            batch = image_batch(size)
            with torch.no_grad():
                class_loss(model.train(), batch)
            return model, batch, class_loss
        except Exception as error:
            errors.append(f"{name}: {one_line(error)}")
    raise ValueError("; ".join(errors))


def torchvision_families() -> list[Family]:
    """The smallest classifier of each module of torchvision.models, segmentation models, detectors of one stage, and a classifier of video."""
    define_missing_operators()
    import torchvision.models as models

    by_module: dict[str, list[str]] = {}
    for name in models.list_models(module=models):
        by_module.setdefault(models.get_model_builder(name).__module__.rpartition(".")[2], []).append(name)
    found = [Family("torchvision", module, lambda names=names: _build_torchvision(names)) for module, names in by_module.items()]  # type: ignore[misc]
    for name in models.list_models(module=models.segmentation):
        found.append(Family("torchvision", name, lambda name=name: _build_segmentation(name)))  # type: ignore[misc]
    for name in ("RetinaNet", "FCOS"):  # detectors of two stages draw random samples
        found.append(Family("torchvision", name.lower(), lambda name=name: _build_detector(name)))  # type: ignore[misc]
    return [*found, Family("torchvision", "mc3_18", _build_video)]


def _build_torchvision(names: list[str]) -> Built:
    import torchvision.models as models

    sizes: dict[str, int] = {}
    for name in names:
        with torch.device("meta"):
            sizes[name] = sum(p.numel() for p in models.get_model(name, num_classes=10).parameters())
    name = min(sizes, key=lambda n: sizes[n])
    options = {"image_size": 64} if name.startswith("vit") else {"input_size": (64, 64)} if name.startswith("maxvit") else {}
    options |= {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    batch = image_batch(96 if "inception" in name else 64)
    return models.get_model(name, num_classes=10, **options), batch, class_loss


def _build_segmentation(name: str) -> Built:
    import torchvision.models as models

    images, _ = image_batch(64)
    return models.get_model(name, weights=None, weights_backbone=None, num_classes=5), images, output_loss


def _build_video() -> Built:
    import torchvision.models as models

    images, labels = image_batch(32)
    return models.get_model("mc3_18", num_classes=10), (images.unsqueeze(2).expand(-1, -1, 4, -1, -1).contiguous(), labels), class_loss


def _build_detector(name: str) -> Built:
    from torchvision.models import detection
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    anchors = AnchorGenerator(tuple((size,) for size in (8, 16, 32, 64, 128)), ((1.0,),) * 5)  # one for each map of the pyramid
    backbone = detection.backbone_utils.resnet_fpn_backbone(backbone_name="resnet18", weights=None)
    model = getattr(detection, name)(backbone, num_classes=5, min_size=32, max_size=32, anchor_generator=anchors)
    images, labels = image_batch(32, classes=4)
    boxes = torch.tensor([[4.0, 4.0, 24.0, 24.0]]).expand(len(images), 1, 4).clone()
    return model, {"images": images, "boxes": boxes, "labels": labels[:, None] + 1}, detection_loss


def detection_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The sum of a detector's own losses; every image has its boxes in a dict."""
    targets = [{"boxes": boxes, "labels": labels} for boxes, labels in zip(batch["boxes"], batch["labels"], strict=True)]
    return torch.stack(list(model(list(batch["images"]), targets).values())).sum()

#!/usr/bin/env python3
"""Hold a model folder against transformers: fields, tensors, logits, loss and every gradient in fp32. CPU alone.

The last line is PASS or FAIL."""

import argparse
import importlib.metadata
import importlib.util
import inspect
import json
import sys
from pathlib import Path
from typing import Any

WORST = 5  # gradients shown of a config that differs

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from skill import ROOT, end, use_environment  # noqa: E402

use_environment("not checked: ")
if importlib.util.find_spec("transformers") is None:
    end("FAIL", "not checked: transformers is not installed; it comes with the package's test extra")

sys.path.insert(0, str(ROOT / "tests"))  # the comparison that the tests use is the one here

import torch  # noqa: E402
import transformers  # noqa: E402

import oracle  # noqa: E402  # pyright: ignore[reportMissingImports]
from pithtrain.errors import PithtrainError  # noqa: E402
from pithtrain.models.contract import ModelConfig  # noqa: E402
from pithtrain.spec import read_model  # noqa: E402


def draft(source: str) -> None:
    """What there is to write a folder from: fields, tensors and the code to read of a model_type or a config.json."""
    fields: dict[str, Any] = json.loads(Path(source).read_text()) if source.endswith(".json") else {}
    model_type = fields.pop("model_type", source)
    if model_type not in transformers.CONFIG_MAPPING:
        end("FAIL", f"no draft: transformers {transformers.__version__} has no model_type {model_type!r}")
    config = transformers.AutoConfig.for_model(model_type, **fields)
    with torch.device("meta"):  # shapes alone
        model = transformers.AutoModelForCausalLM.from_config(config)
    print(f"code to read: {inspect.getsourcefile(type(model))}")
    print(f"              {inspect.getsourcefile(type(config))}")
    for name, value in sorted(config.to_dict().items()):
        default = bool(fields) and name not in fields
        print(f"field   {name} = {value!r}{'  (a default of the class: the file lacks it)' if default else ''}")
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for (name, shape), count in oracle.kinds(shapes.items()).items():
        print(f"tensor  {name} {list(shape)} x {count}")
    hidden = {name.rpartition(".")[2] for name, _ in model.named_buffers() if name not in shapes}
    print(f"buffers that no file holds: {', '.join(sorted(hidden)) or 'none'}")
    end("PASS", f"{model_type}: {len(config.to_dict())} fields and {len(shapes)} tensors to account for")


def check_fields(architecture: str, configs: dict[str, ModelConfig]) -> list[str]:
    """Prints what becomes of each field of the family; what is wrong."""
    found = {one.name: one for config in configs.values() for one in oracle.fields(architecture, config)}
    for one in sorted(found.values(), key=lambda one: (one.use, one.name)):
        print(f"field   {one.use}: {one.name}: {one.why}")
    lost = [f"field {name} is neither read, ignored nor refused" for name, one in found.items() if one.use == "LOST"]
    same = [f"field {name} is {' '.join(v)} in every config" for name, v in oracle.untried(architecture).items()]
    return lost + same


def check_tensors(configs: dict[str, ModelConfig]) -> list[str]:
    """Prints each kind of tensor once, with its place among our parameters; what is wrong in any config."""
    seen: set[str] = set()
    wrong: list[str] = []
    for label, config in configs.items():
        for one in oracle.tensors(config):
            if one.theirs != one.ours:
                theirs, ours = (list(shape) if shape else "none" for shape in (one.theirs, one.ours))
                wrong.append(f"tensor {one.name} of {label}: transformers has {theirs}, hf_tensors() {ours}")
            elif one.name not in seen:
                print(f"tensor  {one.name} {list(one.ours or ())} x {one.times} -> {one.parameter}  ({label})")
            seen.add(one.name)
    return wrong


def check_numbers(architecture: str, label: str, config: ModelConfig) -> tuple[list[str], float]:
    """Prints logits, loss and the worst gradients of one config; what is wrong, and the largest difference."""
    found = oracle.compare(architecture, config)
    name, gradient = found.worst()
    worst = max(found.logits, found.loss, gradient)
    print(f"numbers {label}: logits {found.logits:.1e}, loss {found.loss:.1e}, gradients {gradient:.1e} ({name})")
    if worst < oracle.TOLERANCE:
        return [], worst
    print(f"        logits at position 0 {found.positions[0]:.1e}, at the last {found.positions[-1]:.1e}")
    for name, difference in sorted(found.gradients.items(), key=lambda item: -item[1])[:WORST]:
        print(f"        gradient {difference:.1e} {name}")
    return [f"{label} differs by {worst:.1e}"], worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a folder of pithtrain/models, or the path (with a slash) of another")
    parser.add_argument("--config", type=Path, metavar="JSON", help="a published config.json that the folder must read")
    parser.add_argument("--draft", metavar="MODEL_TYPE|JSON", help="print what a new folder has to account for")
    given = parser.parse_args()
    torch.set_num_threads(1)  # the models are tiny
    if given.draft:
        draft(given.draft)
    if not given.model:
        parser.error("name a model, or --draft")

    wrong: list[str] = []
    worst = 0.0
    try:
        configs = oracle.configs(given.model)
        wrong += check_fields(given.model, configs)
        if given.config:
            read_model({"architecture": given.model, "config_file": str(given.config)})
            print(f"config  {given.config} is read")
        wrong += check_tensors(configs)
        for label, config in configs.items():
            problems, difference = check_numbers(given.model, label, config)
            wrong += problems
            worst = max(worst, difference)
    except (PithtrainError, AssertionError, AttributeError, ImportError, RuntimeError, ValueError) as error:
        end("FAIL", f"{given.model}: {type(error).__name__}: {' '.join(str(error).split())}")
    if wrong:
        for line in wrong:
            print(f"wrong   {line}")
        end("FAIL", f"{given.model}: {len(wrong)} differences; the first: {wrong[0]}")
    version = f"transformers {transformers.__version__}"
    end("PASS", f"{given.model} equals {version} in {len(configs)} configs, all within {worst:.1e} in fp32")


if __name__ == "__main__":
    main()

"""A small but complete result.json and what a run folder holds beside it."""

from typing import Any

import pandas as pd

from bitwright.report.extras import Prediction, ReportExtras

ROLES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
CATEGORIES = ("code", "chat", "math", "tool_calling")


def score(kld: float | None, ratio: float | None = None) -> dict[str, Any]:
    if kld is None:
        return {
            "kld_nats": None,
            "se": None,
            "kld_p99": None,
            "top1": None,
            "ppl_ratio": None,
            "n_tokens": 0,
        }
    found: dict[str, Any] = {
        "kld_nats": kld,
        "se": kld * 0.08,
        "kld_p99": kld * 9,
        "top1": 1 - kld,
        "n_tokens": 9120,
        "ppl_ratio": 1 + kld,
    }
    if ratio is not None:
        found["ratio"] = interval(ratio)
    return found


def interval(value: float | None) -> dict[str, Any]:
    if value is None:
        return {"value": None, "low": None, "high": None, "n_documents": 0}
    return {"value": value, "low": value * 0.9, "high": value * 1.1, "n_documents": 60}


def file(label: str, layout: str, imatrix: str, size_bytes: int, kld: float, **more: Any) -> dict:
    scores = {c: score(kld * (1 + 0.3 * i)) for i, c in enumerate(CATEGORIES)}
    return {
        "label": label,
        "path": None,
        "layout": layout,
        "imatrix": imatrix,
        "bpw": 3.5,
        "size_bytes": size_bytes,
        "scores": scores,
        **more,
    }


def make_result() -> dict[str, Any]:
    files = [
        file("Q3_K_S, general imatrix", "Q3_K_S", "general", 2_200_000, 0.066),
        file("Q3_K_S, task imatrix", "Q3_K_S", "task", 2_200_000, 0.065),
        file("IQ3_S, task imatrix", "IQ3_S", "task", 2_203_000, 0.061),
        file("ours, general imatrix", "ours", "general", 2_202_640, 0.034),
        file("ours, task imatrix", "ours", "task", 2_202_640, 0.033, path="/home/me/x/out.gguf"),
    ]
    for entry in files:
        if entry["label"] != "Q3_K_S, task imatrix":
            entry["scores"]["code"]["ratio"] = interval(entry["scores"]["code"]["kld_nats"] / 0.065)
    files[4]["scores"]["math"] = score(None)
    return {
        "schema": 1,
        "model": "/home/me/models/demo-F16.gguf",
        "target": "code",
        "budget_bytes": 2_202_640,
        "chosen": "ours, task imatrix",
        "baseline": "Q3_K_S, task imatrix",
        "files": files,
        "target_kld_ratio": interval(0.51),
        "off_target_kld_ratio": {
            "chat": interval(0.9),
            "math": interval(None),
            "tool_calling": interval(1.3),
        },
        "predicted_over_measured": 1.21,
        "verdict": "better",
    }


def make_extras(**changes: Any) -> ReportExtras:
    layers: list[int | None] = [None, *range(5)]
    tensors, damage = [], []
    for layer in layers:
        for i, role in enumerate(ROLES if layer is not None else ("token_embd",)):
            name = f"{role}.weight" if layer is None else f"blk.{layer}.{role}.weight"
            n = 2048 * 256 if layer is None else 256 * 768
            tensors.append({"tensor": name, "role": role, "layer": layer, "n_elements": n})
            for j, category in enumerate(CATEGORIES):
                for span in ("scored", "overall"):
                    nats = 1e-3 * 1.7**i * (1 + (layer or 9)) * (1 + j) * (0.5 if span else 1)
                    damage.append(
                        {
                            "tensor": name,
                            "role": role,
                            "layer": layer,
                            "type": "Q2_K",
                            "category": category,
                            "span": span,
                            "kld_nats": nats,
                            "se": nats / 8,
                        }
                    )
    ladder = ("Q3_K", "Q4_K", "Q2_K", "Q5_K", "Q6_K")
    ours = {t["tensor"]: ladder[i * 7 % 5] for i, t in enumerate(tensors)}
    stock = {t["tensor"]: "Q3_K" for t in tensors}
    fields: dict[str, Any] = {
        "damage_map": pd.DataFrame(damage),
        "tensors": pd.DataFrame(tensors),
        "layouts": {"ours, task imatrix": ours, "Q3_K_S, task imatrix": stock},
        "names": {"ours, task imatrix": "Q3_K_L (54 % of the body in Q3_K)"},
        "predictions": [
            Prediction("ours, task imatrix", "code", 0.04, 0.033),
            Prediction("Q3_K_S, task imatrix", "code", 0.075, 0.065),
            Prediction("role rule", "code", 0.051, 0.038),
        ],
        "corpora": {
            c: {
                s: {"documents": 40, "tokens": 20480, "chunks": 40}
                for s in ("calibrate", "probe", "select", "report")
            }
            for c in CATEGORIES
        },
        "noise_nats": {"code": 3e-9, "chat": 2e-9, "math": None},
        "recipe": {
            "seed": 1,
            "model_sha256": "ab" * 32,
            "versions": {"llama-cpp-python": "0.3.36"},
        },
        "notes": ["a note"],
        "command": "bitwright run coding-q3_k_s --model demo",
    }
    return ReportExtras(**{**fields, **changes})

"""Plans a small language model before it is loaded, runs it, compares prediction and measurement, and saves a trace."""

import tempfile
from pathlib import Path

import torch
import transformers

import weightstream

torch.manual_seed(0)
sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8192, **sizes)).eval()
ids = torch.randint(8192, (1, 16))

with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
    plain.save_pretrained(folder)
    # A step is a forward of 16 new tokens, with nothing in the cache before them.
    settings = {"device": "cpu", "device_budget": "48MiB", "tokens": 16, "context": 16}
    plan = weightstream.plan_model(folder, **settings)
    print(plan)

    model = weightstream.from_pretrained(folder, progress=False, **settings)
    streamed = [model(ids).logits for _ in range(20)]
    stats = model.weightstream.stats()
    print(f"predicted before it ran: {1e3 * plan.step_s:.1f} ms per step")
    print(f"predicted later:         {1e3 * stats.predicted_step_s:.1f} ms")
    print(f"measured:                {1e3 * stats.step_s:.1f} ms, the median of the timed steps")
    print(f"waited for copies:       {1e3 * stats.stall_s / stats.steps:.1f} ms per step")
    slowest = max(stats.units, key=lambda unit: unit.copy_s)
    print(f"slowest copy:            {1e3 * slowest.copy_s:.2f} ms, {slowest.name}")

    with model.weightstream.trace() as trace:
        streamed.append(model(ids).logits)
    path = Path(folder, "trace.json")  # save to a file that stays, and open it in https://ui.perfetto.dev
    trace.save(path)
    print(f"trace: {len(trace.spans)} spans, {path.stat().st_size} bytes")
    print("identical:", all(torch.equal(logits, plain(ids).logits) for logits in streamed))

"""A small Hugging Face Llama in float64, alone and sharded, and what tests compare of the two."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tpcompile
from tpcompile.parameters import layouts_by_id
from tpcompile.stored import gather_full

VOCAB = 64


def llama(layers=2, **config):
    """Random weights, grouped-query attention, no dropout, nothing computed in float32."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
    }
    options = {"use_cache": False, "attn_implementation": "sdpa"}
    model = LlamaForCausalLM(LlamaConfig(**sizes | options | config))
    for name, module in list(model.named_modules()):
        if isinstance(module, LlamaRMSNorm):  # upcasts to float32, which for float64 is down
            model.set_submodule(name, nn.RMSNorm(32, eps=1e-6))
    return model.double()


def tokens(batch=2, length=8, seed=1):
    """Random ids [batch, length]."""
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def pair(sequence_parallel=False, mesh=None, **config):
    """(plain, sharded over all ranks): equal weights, captured on `tokens()`."""
    plain = llama(**config)
    model = copy.deepcopy(plain)
    if mesh is None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    ids = {"input_ids": tokens()}
    return plain, tpcompile.shard(model, mesh, ids, sequence_parallel=sequence_parallel)


def loss_for(model, ids, **kwargs):
    """Next-token loss in float64; Hugging Face's own is computed in float32."""
    logits = model(input_ids=ids, **kwargs).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gradients(model):
    """Name -> whole gradient, None where there is none; a sharded model's are gathered."""
    layouts = layouts_by_id(model)
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None and id(parameter) in layouts:
            grad = gather_full(grad, layouts[id(parameter)])
        found[name] = grad
    return found


def assert_close(found, wanted, tolerance=1e-12):
    """Equal trees of float64 tensors, up to the order of sums."""
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def assert_trains_alike(plain, model, ids=None, tolerance=1e-12, **kwargs):
    """One loss and its gradients are equal, on gradients that start from None."""
    ids = tokens() if ids is None else ids
    losses = []
    for each in (plain, model):
        each.zero_grad()
        loss = loss_for(each, ids, **kwargs)
        loss.backward()
        losses.append(loss.detach())
    assert_close(losses[1], losses[0], tolerance)
    found, wanted = gradients(model), gradients(plain)
    assert len(found) == len(wanted)
    for (name, grad), other in zip(found.items(), wanted.values(), strict=True):
        assert (grad is None) == (other is None), name
        if grad is not None:
            torch.testing.assert_close(grad, other, rtol=tolerance, atol=tolerance, msg=name)

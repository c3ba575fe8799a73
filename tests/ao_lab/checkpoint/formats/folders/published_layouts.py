"""How AutoGPTQ, AutoAWQ and bitsandbytes pack weights, written down again from their descriptions, one code at a time.

Codes and zero points are unsigned NumPy integers (outputs, inputs) and (outputs, groups); scales are float16 tensors (outputs,
groups). The functions return the tensors of one layer by name, as the modules `ao_lab.checkpoint.formats` describe them.
"""

import json

import numpy as np
import torch

WORD = 32
#: AutoAWQ's order: nibble i of a word holds output ORDER[i] of its eight.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes, bits):
    """int32 (rows, words) of codes (rows, n): each row is one number, its first code lowest, in words of 32 bits."""
    count = -(-codes.shape[1] * bits // WORD)
    made = np.zeros((len(codes), count), np.uint32)
    for row, values in enumerate(codes.tolist()):
        number = sum(code << (bits * place) for place, code in enumerate(values))
        made[row] = [number >> (WORD * word) & 0xFFFFFFFF for word in range(count)]
    return torch.from_numpy(made.view(np.int32))


def gptq_layer(codes, zeros, scales, bits, *, version=2, index=None):
    """qweight, qzeros, scales and g_idx; version 1 keeps zero points less one (none may be 0)."""
    group = -(-codes.shape[1] // zeros.shape[1])
    index = np.arange(codes.shape[1]) // group if index is None else index
    return {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": words(zeros.T - (version == 1), bits),
        "scales": scales.t().contiguous(),
        "g_idx": torch.from_numpy(np.asarray(index, np.int32)),
    }


def interleaved(codes):
    """Codes (rows, 8 n) in the order of AutoAWQ's words."""
    return codes.reshape(len(codes), -1, 8)[..., list(ORDER)].reshape(codes.shape)


def awq_layer(codes, zeros, scales):
    """qweight, qzeros and scales of version gemm."""
    return {
        "qweight": words(interleaved(codes.T), 4),
        "qzeros": words(interleaved(zeros.T), 4),
        "scales": scales.t().contiguous(),
    }


def bitsandbytes_weight(codes, absmax, table, *, kind="nf4", size=64, dtype="bfloat16", nested=None):
    """The tensors of a weight by the ends of their names; nested: (codebook, maxima, block, offset) of absmax as codes."""
    flat = codes.reshape(-1)
    flat = np.concatenate([flat, np.zeros(len(flat) % 2, flat.dtype)])
    state = {"quant_type": kind, "blocksize": size, "dtype": dtype, "shape": list(codes.shape)}
    made = {
        "": torch.from_numpy((flat[0::2] * 16 + flat[1::2]).astype(np.uint8)[:, None]),
        ".absmax": absmax,
        ".quant_map": table,
    }
    if nested is not None:
        made |= {".nested_quant_map": nested[0], ".nested_absmax": nested[1]}
        state |= {"nested_blocksize": nested[2], "nested_offset": nested[3], "nested_dtype": "float32"}
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {**made, f".quant_state.bitsandbytes__{kind}": text}

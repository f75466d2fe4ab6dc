"""A tiny Llama that has to learn to count: the next token is the last one plus its first."""
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

def build_base():
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
        tie_word_embeddings=True))

def rows(seed, count=48):
    start = torch.randint(1, 8, (count, 1), generator=torch.Generator().manual_seed(seed))
    return start * torch.arange(1, 9)

def selection_data():
    return [{"input_ids": batch} for batch in rows(1).split(20)]

def heldout_data():
    return [{"input_ids": batch} for batch in rows(2).split(20)]

def loss(outputs, batch):
    return F.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())

def examples():
    return [{"input_ids": row, "labels": row} for row in rows(0, 64)]

from pathlib import Path
from peft import LoraConfig, get_peft_model

def build_model():
    base = LlamaForCausalLM.from_pretrained(Path(__file__).parent / "base")
    return get_peft_model(base, LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

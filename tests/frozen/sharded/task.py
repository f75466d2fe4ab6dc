"""A tiny BERT that tells whether the first token is a large one."""
import torch
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

def build_model():
    return BertForSequenceClassification(BertConfig(
        vocab_size=64, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=8))

def data(seed, count=48):
    ids = torch.randint(0, 64, (count, 6), generator=torch.Generator().manual_seed(seed))
    return ids, (ids[:, 0] > 32).long()

def batches(seed):
    ids, labels = data(seed)
    return [{"input_ids": i, "labels": l} for i, l in zip(ids.split(20), labels.split(20))]

def selection_data():
    return batches(1)

def heldout_data():
    return batches(2)

def predict(model, batch):
    return model(input_ids=batch["input_ids"]).logits

def loss(outputs, batch):
    return F.cross_entropy(outputs, batch["labels"])

def examples():
    return [{"input_ids": i, "labels": l} for i, l in zip(*data(0, 64))]

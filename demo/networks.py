"""The demo's tokenizer, text encoders and transformer, untrained."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from captions import MAX_LENGTH, PHRASINGS, all_items, caption, load_sheet, random_caption
from diffusers import FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

WIDTH = 256


def make_tokenizer(vocab_size: int = 1536) -> PreTrainedTokenizerFast:
    """A lower-casing byte-level BPE trained on the captions."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    items = all_items()
    rng = random.Random(0)
    texts = [caption(p, it) for it in items for p in PHRASINGS] + [random_caption(it, rng) for it in items * 4]
    texts += [f"{m['style']} emoji of {m['label']}" for m in load_sheet()[1]]
    tok = Tokenizer(models.BPE(unk_token="<unk>"))
    tok.normalizer = normalizers.Lowercase()
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tok.decoder = decoders.ByteLevel()
    special = ["<pad>", "</s>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tok.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tok,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=MAX_LENGTH,
    )


@dataclass
class Models:
    """The three networks that are trained together."""

    clip: CLIPTextModel
    t5: T5EncoderModel
    transformer: FluxTransformer2DModel

    def parameters(self) -> list[torch.nn.Parameter]:
        """All parameters in a fixed order."""
        return [p for m in (self.clip, self.t5, self.transformer) for p in m.parameters()]


def make_models(vocab_size: int, double: int, single: int) -> Models:
    """Untrained networks; the modulations start at zero, so every block starts as the identity."""
    clip = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=vocab_size,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            projection_dim=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=4,
            max_position_embeddings=MAX_LENGTH,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
        )
    )
    t5 = T5EncoderModel(
        T5Config(
            vocab_size=vocab_size,
            d_model=WIDTH,
            d_kv=64,
            d_ff=2 * WIDTH,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            pad_token_id=0,
            eos_token_id=1,
        )
    )
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=32,
        num_layers=double,
        num_single_layers=single,
        attention_head_dim=32,
        num_attention_heads=WIDTH // 32,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )
    for name, module in transformer.named_modules():
        if isinstance(module, torch.nn.Linear) and (".norm" in name or name in ("norm_out.linear", "proj_out")):
            torch.nn.init.zeros_(module.weight)
            torch.nn.init.zeros_(module.bias)
    return Models(clip, t5, transformer)

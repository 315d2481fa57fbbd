"""Tiny transformers of diffusers with random weights, and inputs for them; the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def wan(length: int, batch: int, generator: torch.Generator, heads: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """``length`` video tokens, in one row of patches."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=heads,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=3,
    )
    return model, {
        "hidden_states": _random(generator, batch, 4, 1, 2, 2 * length),
        "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": _random(generator, batch, 7, 16),
    }


def wan_by_token(length: int, batch: int, generator: torch.Generator, heads: int) -> Any:
    """With a time step for each token, as Wan 2.2 TI2V has it."""
    model, inputs = wan(length, batch, generator, heads)
    inputs["timestep"] = torch.randint(0, 1000, (batch, length), generator=generator)
    return model, inputs


def wan_image(length: int, batch: int, generator: torch.Generator, heads: int) -> Any:
    """With an image's tokens in the cross-attention, as Wan 2.1 I2V has them; text of the 512 tokens it takes for
    granted."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=heads,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        image_dim=8,
        added_kv_proj_dim=heads * 12,
    )
    _, inputs = wan(length, batch, generator, heads)
    inputs["encoder_hidden_states"] = _random(generator, batch, 512, 16)
    inputs["encoder_hidden_states_image"] = _random(generator, batch, 5, 8)
    return model, inputs


def flux(length: int, batch: int, generator: torch.Generator, heads: int, text: int = 5) -> Any:
    """``length`` image tokens and ``text`` text tokens in joint attention."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=heads,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    positions = torch.stack([torch.zeros(length), torch.arange(length) // 4, torch.arange(length) % 4], 1)
    return model, {
        "hidden_states": _random(generator, batch, length, 4),
        "encoder_hidden_states": _random(generator, batch, text, 32),
        "pooled_projections": _random(generator, batch, 32),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": positions,
        "txt_ids": torch.zeros(text, 3),
    }


def flux_short_text(length: int, batch: int, generator: torch.Generator, heads: int) -> Any:
    """One text token: of the ranks behind the first none has any."""
    return flux(length, batch, generator, heads, text=1)


def flux_controlnet(length: int, batch: int, generator: torch.Generator, heads: int) -> Any:
    """With residuals of a ControlNet, of all image tokens."""
    model, inputs = flux(length, batch, generator, heads)
    inputs["controlnet_block_samples"] = [_random(generator, batch, length, heads * 16) for _ in range(2)]
    inputs["controlnet_single_block_samples"] = (_random(generator, batch, length, heads * 16),)
    return model, inputs


def flux2(length: int, batch: int, generator: torch.Generator, heads: int) -> Any:
    """Its positions have a batch, and so as many dimensions as tokens."""
    from diffusers import Flux2Transformer2DModel

    model = Flux2Transformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=heads,
        joint_attention_dim=32,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )
    positions, of_text = torch.zeros(batch, length, 4), torch.zeros(batch, 5, 4)
    positions[..., 2], of_text[..., 3] = torch.arange(length), torch.arange(5)
    return model, {
        "hidden_states": _random(generator, batch, length, 4),
        "encoder_hidden_states": _random(generator, batch, 5, 32),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": positions,
        "txt_ids": of_text,
        "guidance": torch.full((batch,), 4.0),
    }


def flux_ip(length: int, batch: int, generator: torch.Generator, heads: int) -> Any:
    """Image tokens attend to those of another image, which all ranks have: as many as the first of two ranks has of 13
    image tokens."""
    from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    model, inputs = flux(length, batch, generator, heads)
    processors = dict(model.attn_processors)
    for name in processors:
        if name.startswith("transformer_blocks"):
            processors[name] = FluxIPAdapterAttnProcessor(heads * 16, 32, num_tokens=(7,))
    model.set_attn_processor(processors)
    projection = ImageProjection(image_embed_dim=8, cross_attention_dim=32, num_image_text_embeds=7)
    model.encoder_hid_proj = MultiIPAdapterImageProjection([projection])
    hidden = [_random(generator, batch, 7, 32)]
    return model, {**inputs, "joint_attention_kwargs": {"ip_hidden_states": hidden}}


def minimax_h3(length: int, batch: int, generator: torch.Generator, heads: int) -> Any:
    """Attention over text alone, which is not split, before that over text, video and audio in one sequence."""
    from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Transformer3DModel

    model = MiniMaxH3Transformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=16,
        hidden_size=heads * 16,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=32,
        in_channels=4,
        audio_in_channels=4,
        patch_size=(1, 1, 1),
        text_dim=16,
        freq_dim=16,
        time_embed_hidden_dim=16,
        time_embed_dim=16,
        rope_freq_dim=2,
    )
    text, audio = 4, 3
    tokens = text + length + audio
    tags = torch.tensor([1] * text + [0] * length + [2] * audio)
    return model, {
        "hidden_states": _random(generator, batch, length, 4),
        "audio_hidden_states": _random(generator, batch, audio, 4),
        "encoder_hidden_states": _random(generator, batch, text, 16),
        "timestep": torch.tensor([0.3, 0.7]),
        "timestep_indices": torch.arange(tokens) % 2,
        "token_tags": tags,
        "position_ids": torch.randint(0, 9, (tokens, 3), generator=generator),
        "video_indices": torch.arange(text, text + length),
        "audio_indices": torch.arange(text + length, tokens),
        "text_indices": torch.arange(text),
    }


def qwen(length: int, batch: int, generator: torch.Generator, heads: int) -> Any:
    """A joint attention with a mask of the text."""
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=heads,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    return model, {
        "hidden_states": _random(generator, batch, length, 16),
        "encoder_hidden_states": _random(generator, batch, 9, 16),
        "encoder_hidden_states_mask": text_mask(batch),
        "timestep": torch.full((batch,), 0.5),
        "img_shapes": [[(1, 1, length)]] * batch,
    }


def qwen_controlnet(length: int, batch: int, generator: torch.Generator, heads: int) -> Any:
    model, inputs = qwen(length, batch, generator, heads)
    return model, {**inputs, "controlnet_block_samples": [_random(generator, batch, length, heads * 16)]}


def qwen_short_text(length: int, batch: int, generator: torch.Generator, heads: int) -> Any:
    """One text token, which is rotated apart from the image's; of the ranks behind the first none has any."""
    model, inputs = qwen(length, batch, generator, heads)
    return model, {
        **inputs,
        "encoder_hidden_states": inputs["encoder_hidden_states"][:, :1],
        "encoder_hidden_states_mask": None,
    }


def qwen_without_mask(length: int, batch: int, generator: torch.Generator, heads: int) -> Any:
    model, inputs = qwen(length, batch, generator, heads)
    return model, {**inputs, "encoder_hidden_states_mask": None}


def hunyuan_video(length: int, batch: int, generator: torch.Generator, heads: int) -> Any:
    """A joint attention, image before text, with a mask of the whole."""
    from diffusers import HunyuanVideoTransformer3DModel

    model = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=heads,
        attention_head_dim=10,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
    )
    return model, {
        "hidden_states": _random(generator, batch, 4, 1, 1, length),
        "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": _random(generator, batch, 9, 16),
        "encoder_attention_mask": text_mask(batch),
        "pooled_projections": _random(generator, batch, 8),
        "guidance": torch.full((batch,), 6.0),
    }


def ltx(length: int, batch: int, generator: torch.Generator, heads: int) -> Any:
    """Cross-attention to masked text; as many text tokens as two ranks have of 18 video tokens."""
    from diffusers import LTXVideoTransformer3DModel

    model = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=heads,
        attention_head_dim=16,
        cross_attention_dim=heads * 16,
        num_layers=2,
        caption_channels=16,
    )
    return model, {
        "hidden_states": _random(generator, batch, length, 8),
        "encoder_hidden_states": _random(generator, batch, 9, 16),
        "timestep": torch.full((batch,), 500),
        "encoder_attention_mask": text_mask(batch),
        "num_frames": 1,
        "height": 1,
        "width": length,
    }


_BUILDERS = (
    wan,
    wan_by_token,
    wan_image,
    flux,
    flux_short_text,
    flux_controlnet,
    flux_ip,
    flux2,
    minimax_h3,
    qwen,
    qwen_controlnet,
    qwen_short_text,
    qwen_without_mask,
    hunyuan_video,
    ltx,
)
MODELS: dict[str, Callable[..., tuple[torch.nn.Module, dict[str, Any]]]] = {
    builder.__name__: builder for builder in _BUILDERS
}


def make(name: str, length: int, batch: int, heads: int = 4, seed: int = 0) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model in evaluation mode, in fp32, and its inputs."""
    torch.manual_seed(seed)
    model, inputs = MODELS[name](length, batch, torch.Generator().manual_seed(seed), heads)
    for parameter in model.parameters():  # what starts at zero would hide what comes before it
        torch.nn.init.normal_(parameter, std=0.2 if parameter.ndim > 1 else 0.1)
    return model.eval(), {**inputs, "return_dict": False}


def text_mask(batch: int) -> torch.Tensor:
    """(batch, 9): of the last prompt's 9 tokens, 4 count."""
    mask = torch.ones(batch, 9, dtype=torch.bool)
    mask[-1, 4:] = False
    return mask


def moved(inputs: Any, device: torch.device) -> Any:
    """The inputs, with all tensors in dictionaries, lists and tuples on the device."""
    if isinstance(inputs, torch.Tensor):
        return inputs.to(device)
    if isinstance(inputs, dict):
        return {name: moved(x, device) for name, x in inputs.items()}
    return type(inputs)(moved(x, device) for x in inputs) if isinstance(inputs, (list, tuple)) else inputs


def compiled(model: torch.nn.Module, how: str) -> Callable[..., Any]:
    """The model as it is called: eager, compiled as a whole by ulysses_op.compile or a backend of torch.compile, or
    block by block."""
    import ulysses_op

    if how == "eager":
        return model
    torch._dynamo.reset()  # all models go through a function of diffusers whose versions are counted together
    if how == "inductor":
        return ulysses_op.compile(model, fullgraph=True)
    if how == "blocks":
        model.compile_repeated_blocks(fullgraph=True, options=ulysses_op.compile_options())

        def called(**inputs: Any) -> Any:
            with torch._dynamo.config.patch(error_on_recompile=True):
                return model(**inputs)

        return called
    return torch.compile(model, fullgraph=True, backend=how)


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)

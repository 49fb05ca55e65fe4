"""Gemma-2 in sizes at which its differences show: windows and caps that a short test reaches."""

SIZES = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "num_hidden_layers": 3,
    "sliding_window": 8,
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 6.0,
    "pad_token_id": None,
}
CASES = {
    "Gemma2ForCausalLM": {
        "model_type": "gemma2",
        "sizes": SIZES,
        "gain": 0.8,  # embeddings are scaled up and tied to the head: large ones would predict themselves
        "variants": {
            "no-caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            "untied": {"tie_word_embeddings": False},
        },
        "refuses": [{"hidden_activation": "silu"}, {"layer_types": ["full_attention"]}],
    }
}

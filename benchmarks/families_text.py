"""Families of language models."""

from __future__ import annotations

import transformers as tf

from benchmarks.family import VOCABULARY, Family, causal, encoder, family, masked, sizes, tokens


@family
def bert(small: bool) -> Family:
    return masked(small, tf.BertForMaskedLM(tf.BertConfig(**encoder(small))))


@family
def albert(small: bool) -> Family:
    return masked(
        small,
        tf.AlbertForMaskedLM(
            tf.AlbertConfig(
                **encoder(small),
                embedding_size=sizes(small)["width"] // 2,
                hidden_dropout_prob=0.1,
                attention_probs_dropout_prob=0.1,
            )
        ),
    )


@family
def deberta_v2(small: bool) -> Family:
    config = tf.DebertaV2Config(
        **encoder(small),
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=16,
        norm_rel_ebd="layer_norm",
    )
    return masked(small, tf.DebertaV2ForMaskedLM(config))


@family
def modernbert(small: bool) -> Family:
    config = tf.ModernBertConfig(
        **encoder(small),
        local_attention=16,
        attention_dropout=0.1,
        mlp_dropout=0.1,
        embedding_dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    return masked(small, tf.ModernBertForMaskedLM(config))


@family
def gpt2(small: bool) -> Family:
    s = sizes(small)
    config = tf.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=s["length"],
        n_embd=s["width"],
        n_layer=s["layers"],
        n_head=s["heads"],
        bos_token_id=1,
        eos_token_id=2,
    )
    return causal(small, tf.GPT2LMHeadModel(config))


@family
def llama(small: bool) -> Family:
    config = tf.LlamaConfig(**encoder(small), num_key_value_heads=sizes(small)["heads"] // 2, attention_dropout=0.1)
    return causal(small, tf.LlamaForCausalLM(config))


@family
def qwen3(small: bool) -> Family:
    s = sizes(small)
    config = tf.Qwen3Config(
        **encoder(small), num_key_value_heads=s["heads"] // 2, head_dim=s["width"] // s["heads"], attention_dropout=0.1
    )
    return causal(small, tf.Qwen3ForCausalLM(config))


@family
def mixtral(small: bool) -> Family:
    s = sizes(small)
    config = tf.MixtralConfig(
        **{**encoder(small), "intermediate_size": 2 * s["width"]},
        num_key_value_heads=s["heads"] // 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        attention_dropout=0.1,
    )
    return causal(small, tf.MixtralForCausalLM(config))


@family
def mamba(small: bool) -> Family:
    s = sizes(small)
    config = tf.MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=s["width"] // 2,
        state_size=8,
        num_hidden_layers=2 if small else 3,
        use_cache=False,
    )
    ids = tokens(s["batch"], 12 if small else 32)  # the scan is a Python loop over the sequence
    return Family(tf.MambaForCausalLM(config), (), {"input_ids": ids, "labels": ids}, None)


@family
def t5(small: bool) -> Family:
    s = sizes(small)
    config = tf.T5Config(
        vocab_size=VOCABULARY,
        d_model=s["width"],
        d_kv=s["width"] // s["heads"],
        d_ff=4 * s["width"],
        num_layers=s["layers"] // 2 + 1,
        num_heads=s["heads"],
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    kwargs = {"input_ids": tokens(s["batch"], s["length"]), "labels": tokens(s["batch"], s["length"] // 2)}
    return Family(tf.T5ForConditionalGeneration(config), (), kwargs, None)


# -- images ---------------------------------------------------------------------------------------------------------

"""What PEFT 0.21.2 knows: every adapter type, the prefix of its parameters, and the fields of its config.

Written down so that no PEFT is needed to read an adapter; a test compares it with an installed one.
"""

from typing import Final, NamedTuple


class PeftKind(NamedTuple):
    """One PEFT type: its parameters' prefix, whether it learns a prompt, and the fields of its config."""

    prefix: str
    prompt: bool
    fields: frozenset[str]


COMMON_FIELDS: Final = frozenset(
    ["auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision", "task_type"]
)

LEGACY_FIELDS: Final = frozenset(["enable_lora", "merge_weights"])
"""Fields of a LoRA config that PEFT has dropped since."""

LEGACY_KINDS: Final = {"BONE": "bone_"}
"""Types that PEFT has dropped since, with their parameters' prefix."""


def _kind(prefix: str, fields: str, *, prompt: bool = False) -> PeftKind:
    return PeftKind(prefix, prompt, frozenset(fields.split()))


KINDS: Final[dict[str, PeftKind]] = {
    "ADALORA": _kind(
        "lora_",
        "alora_invocation_tokens alpha_pattern arrow_config beta1 beta2 bias corda_config deltaT "
        "ensure_weight_tying eva_config exclude_modules fan_in_fan_out init_lora_weights init_r kasa_config "
        "layer_replication layers_pattern layers_to_transform loftq_config lora_alpha lora_bias lora_dropout "
        "lora_ga_config megatron_config megatron_core modules_to_save monteclora_config orth_reg_weight "
        "qalora_group_size r rank_pattern runtime_config target_modules target_parameters target_r tfinal "
        "tinit total_step trainable_token_indices use_bdlora use_dora use_qalora use_rslora velora_config",
    ),
    "ADAMSS": _kind(
        "adamss_",
        "asa_importance_beta asa_schedule_exponent asa_target_subspaces asa_uncertainty_beta final_warmup "
        "init_warmup init_weights layers_pattern layers_to_transform mask_interval modules_to_save "
        "num_subspaces r random_seed subspace_rank svd_threshold target_modules use_asa use_dynamic_rank",
    ),
    "ADAPTION_PROMPT": _kind(
        "adaption_prompt_",
        "adapter_layers adapter_len target_modules",
    ),
    "BEFT": _kind(
        "beft_",
        "init_weights modules_to_save target_modules",
    ),
    "BOFT": _kind(
        "boft_",
        "bias boft_block_num boft_block_size boft_dropout boft_n_butterfly_factor exclude_modules "
        "fan_in_fan_out init_weights layers_pattern layers_to_transform modules_to_save target_modules",
    ),
    "C3A": _kind(
        "c3a_",
        "bias block_size block_size_pattern init_weights layers_pattern layers_to_transform modules_to_save "
        "target_modules",
    ),
    "CARTRIDGE": _kind(
        "cartridge_",
        "modules_to_save num_attention_heads num_frozen_tokens num_layers num_transformer_submodules "
        "num_virtual_tokens token_dim",
        prompt=True,
    ),
    "CPT": _kind(
        "cpt_",
        "cpt_mask cpt_token_ids cpt_tokens_type_mask modules_to_save num_attention_heads num_layers "
        "num_transformer_submodules num_virtual_tokens opt_loss_decay_factor opt_projection_epsilon "
        "opt_projection_format_epsilon opt_weighted_loss_type token_dim tokenizer_name_or_path",
        prompt=True,
    ),
    "DEFT": _kind(
        "deft_",
        "alpha bias decomposition_method deft_dropout exclude_modules fan_in_fan_out init_scale init_weights "
        "layers_pattern layers_to_transform modules_to_save para r target_modules",
    ),
    "DELORA": _kind(
        "delora_",
        "bias delora_lambda exclude_modules init_weights lambda_pattern layers_pattern layers_to_transform "
        "module_dropout modules_to_save r rank_pattern target_modules",
    ),
    "FOURIERFT": _kind(
        "fourierft_",
        "bias exclude_modules fan_in_fan_out init_weights layers_pattern layers_to_transform modules_to_save "
        "n_frequency n_frequency_pattern random_loc_seed scaling target_modules",
    ),
    "FROD": _kind(
        "frod_",
        "bias fan_in_fan_out frod_dropout init_weights layers_pattern layers_to_transform modules_to_save "
        "progressbar projection_prng_key regularization_alpha runtime_offload_base_weight save_projection "
        "sparse_rate target_modules",
    ),
    "GLORA": _kind(
        "glora_",
        "bias config_A_B config_C config_D_E init_weights modules_to_save r target_modules",
    ),
    "GRALORA": _kind(
        "gralora_",
        "alpha bias fan_in_fan_out gralora_dropout gralora_k hybrid_r init_weights layers_pattern "
        "layers_to_transform modules_to_save r target_modules",
    ),
    "HIRA": _kind(
        "hira_",
        "exclude_modules fan_in_fan_out hira_dropout init_weights layers_pattern layers_to_transform "
        "modules_to_save r rank_pattern target_modules",
    ),
    "HRA": _kind(
        "hra_",
        "apply_GS bias exclude_modules init_weights layers_pattern layers_to_transform modules_to_save r "
        "target_modules",
    ),
    "IA3": _kind(
        "ia3_",
        "exclude_modules fan_in_fan_out feedforward_modules init_ia3_weights modules_to_save target_modules",
    ),
    "LILY": _kind(
        "lily_",
        "exclude_modules init_weights layers_pattern layers_to_transform modules_to_save num_B r scaling "
        "stride_A target_modules",
    ),
    "LN_TUNING": _kind(
        "ln_tuning_",
        "exclude_modules modules_to_save target_modules",
    ),
    "LOHA": _kind(
        "hada_",
        "alpha alpha_pattern exclude_modules init_weights layers_pattern layers_to_transform module_dropout "
        "modules_to_save r rank_dropout rank_pattern target_modules use_effective_conv2d",
    ),
    "LOKR": _kind(
        "lokr_",
        "alpha alpha_pattern decompose_both decompose_factor exclude_modules init_weights layers_pattern "
        "layers_to_transform module_dropout modules_to_save r rank_dropout rank_dropout_scale rank_pattern "
        "target_modules use_effective_conv2d",
    ),
    "LORA": _kind(
        "lora_",
        "alora_invocation_tokens alpha_pattern arrow_config bias corda_config ensure_weight_tying eva_config "
        "exclude_modules fan_in_fan_out init_lora_weights kasa_config layer_replication layers_pattern "
        "layers_to_transform loftq_config lora_alpha lora_bias lora_dropout lora_ga_config megatron_config "
        "megatron_core modules_to_save monteclora_config qalora_group_size r rank_pattern runtime_config "
        "target_modules target_parameters trainable_token_indices use_bdlora use_dora use_qalora use_rslora "
        "velora_config",
    ),
    "MISS": _kind(
        "miss_",
        "bias exclude_modules init_weights layers_pattern layers_to_transform mini_r miss_dropout "
        "modules_to_save r target_modules",
    ),
    "MULTITASK_PROMPT_TUNING": _kind(
        "multitask_prompt_tuning_",
        "modules_to_save num_attention_heads num_layers num_ranks num_tasks num_transformer_submodules "
        "num_virtual_tokens prompt_tuning_init prompt_tuning_init_state_dict_path prompt_tuning_init_task "
        "prompt_tuning_init_text token_dim tokenizer_kwargs tokenizer_name_or_path",
        prompt=True,
    ),
    "OFT": _kind(
        "oft_",
        "bias block_share coft eps exclude_modules fan_in_fan_out init_weights layers_pattern "
        "layers_to_transform module_dropout modules_to_save num_cayley_neumann_terms oft_block_size r "
        "target_modules use_cayley_neumann",
    ),
    "OSF": _kind(
        "osf_",
        "effective_rank init_weights modules_to_save rank_pattern target_modules target_svd_config",
    ),
    "PEANUT": _kind(
        "peanut_",
        "act_fn depth exclude_modules init_weights layers_pattern layers_to_transform modules_to_save r "
        "scaling target_modules",
    ),
    "POLY": _kind(
        "poly_",
        "exclude_modules init_weights modules_to_save n_skills n_splits n_tasks poly_type r target_modules",
    ),
    "PREFIX_TUNING": _kind(
        "prefix_tuning_",
        "encoder_hidden_size init_weights modules_to_save num_attention_heads num_layers "
        "num_transformer_submodules num_virtual_tokens prefix_projection token_dim",
        prompt=True,
    ),
    "PROMPT_TUNING": _kind(
        "prompt_tuning_",
        "modules_to_save num_attention_heads num_layers num_transformer_submodules num_virtual_tokens "
        "prompt_tuning_init prompt_tuning_init_text token_dim tokenizer_kwargs tokenizer_name_or_path",
        prompt=True,
    ),
    "PSOFT": _kind(
        "psoft_",
        "ab_svd_init cayley_neumann_eps exclude_modules fan_in_fan_out init_weights layers_pattern "
        "layers_to_transform modules_to_save num_cayley_neumann_terms psoft_alpha psoft_dropout psoft_mag_a "
        "psoft_mag_b psoft_orth psoft_svd psoft_svd_lowrank_niter r random_seed target_modules "
        "use_cayley_neumann",
    ),
    "PVERA": _kind(
        "pvera_lambda_",
        "bias d_initial fan_in_fan_out generator_seed init_weights layers_pattern layers_to_transform "
        "modules_to_save projection_prng_key pvera_dropout r sample_at_inference save_projection "
        "target_modules",
    ),
    "P_TUNING": _kind(
        "p_tuning_",
        "encoder_dropout encoder_hidden_size encoder_num_layers encoder_reparameterization_type "
        "modules_to_save num_attention_heads num_layers num_transformer_submodules num_virtual_tokens "
        "token_dim",
        prompt=True,
    ),
    "RANDLORA": _kind(
        "randlora_",
        "bias fan_in_fan_out init_weights layers_pattern layers_to_transform modules_to_save "
        "projection_prng_key r randlora_alpha randlora_dropout save_projection sparse target_modules "
        "very_sparse",
    ),
    "ROAD": _kind(
        "road_",
        "group_size init_weights modules_to_save target_modules variant",
    ),
    "SHADOW": _kind(
        "shadow_",
        "auxiliary_loss_weight exclude_modules init_weights layers_pattern layers_to_transform "
        "modules_to_save r shadow_alpha shadow_dropout shadow_hidden_size shadow_intermediate_size "
        "shadow_model shadow_num_attention_heads shadow_num_hidden_layers share_embeddings target_modules "
        "update_hidden_size",
    ),
    "SHIRA": _kind(
        "shira_",
        "fan_in_fan_out init_weights mask_type modules_to_save r random_seed target_modules",
    ),
    "SUPERTUNING": _kind(
        "supertuning_",
        "init_weights lora_alpha lora_dropout modules_to_save r save_precomputed_indices select_top sparsity "
        "target_modules",
    ),
    "TINYLORA": _kind(
        "tinylora_",
        "bias fan_in_fan_out init_v_bound init_weights layers_pattern layers_to_transform modules_to_save "
        "projection_seed r save_projection target_modules tinylora_dropout u weight_tying",
    ),
    "TRAINABLE_TOKENS": _kind(
        "trainable_tokens_",
        "init_weights target_modules token_indices",
    ),
    "UNILORA": _kind(
        "unilora_",
        "bias fan_in_fan_out init_theta_d_bound init_weights layers_pattern layers_to_transform "
        "modules_to_save proj_seed r save_indices target_modules theta_d_length unilora_dropout",
    ),
    "VBLORA": _kind(
        "vblora_",
        "bias exclude_modules fan_in_fan_out init_logits_std init_vector_bank_bound layers_pattern "
        "layers_to_transform modules_to_save num_vectors r save_only_topk_weights target_modules topk "
        "vblora_dropout vector_length",
    ),
    "VERA": _kind(
        "vera_lambda_",
        "bias d_initial fan_in_fan_out init_weights layers_pattern layers_to_transform modules_to_save "
        "projection_prng_key r save_projection target_modules vera_dropout",
    ),
    "WAVEFT": _kind(
        "waveft_",
        "bias exclude_modules fan_in_fan_out init_weights layers_pattern layers_to_transform modules_to_save "
        "n_frequency n_frequency_pattern proportional_parameters random_loc_seed scaling target_modules "
        "use_idwt wavelet_family",
    ),
    "XLORA": _kind(
        "xlora_",
        "adapters enable_softmax enable_softmax_topk global_scaling_weight hidden_size layerwise_scalings "
        "scaling_pass_value softmax_temperature top_k_lora use_trainable_adapters xlora_depth xlora_dropout_p "
        "xlora_size",
    ),
}
"""Every type, by its name in `peft_type`."""

ALL_FIELDS: Final = frozenset().union(*(kind.fields for kind in KINDS.values()))
"""Fields of any type: one that stands in the config of another type was dropped from it, not invented."""

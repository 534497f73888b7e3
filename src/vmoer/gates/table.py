"""One row a router class of transformers: which rule it follows. See `rules.py` for what the fields mean."""

from vmoer.gates.rules import Rule

_SOFTMAX_NORMALISED = Rule(normalise=True)
_SOFTMAX_FLAG = Rule(normalise="norm_topk_prob")
_DEEPSEEK_V2 = Rule(groups="max", group_fill=0.0, scale="routed_scaling_factor")
_DEEPSEEK_V3 = Rule(
    score="sigmoid",
    bias="e_score_correction_bias",
    groups="top2",
    normalise="norm_topk_prob",
    eps=1e-20,
    scale="routed_scaling_factor",
)
_SIGMOID_BIAS = Rule(score="sigmoid", bias="e_score_correction_bias", normalise=True)
_GEMMA = Rule(
    top_k="config.top_k_experts",
    normalise=True,
    per_expert_scale="per_expert_scale",
    first="probabilities",
    weight=None,
)

RULES: dict[str, Rule] = {
    # top-k, then softmax over the chosen
    "GraniteMoeTopKRouter": _SOFTMAX_NORMALISED,
    "GraniteMoeSharedTopKRouter": _SOFTMAX_NORMALISED,
    "GraniteMoeHybridTopKRouter": _SOFTMAX_NORMALISED,
    "GraniteMoeSWATopKRouter": _SOFTMAX_NORMALISED,
    "GptOssTopKRouter": _SOFTMAX_NORMALISED,
    "AriaTextTopKRouter": _SOFTMAX_NORMALISED,
    "OpenAIPrivacyFilterTopKRouter": Rule(normalise=True, scale="1/top_k"),
    # softmax, then top-k
    "MixtralTopKRouter": _SOFTMAX_NORMALISED,
    "MiniMaxTopKRouter": _SOFTMAX_NORMALISED,
    "HunYuanMoEV1Gate": Rule(normalise=True, weight="wg.weight"),
    "Qwen3_5MoeTopKRouter": _SOFTMAX_NORMALISED,
    "Qwen3OmniMoeTextTopKRouter": _SOFTMAX_NORMALISED,
    "Qwen3VLMoeTextTopKRouter": _SOFTMAX_NORMALISED,
    "Qwen2MoeTopKRouter": _SOFTMAX_FLAG,
    "Qwen3MoeTopKRouter": _SOFTMAX_FLAG,
    "Qwen3NextTopKRouter": _SOFTMAX_FLAG,
    "Qwen3OmniMoeThinkerTextTopKRouter": _SOFTMAX_FLAG,
    "Qwen3OmniMoeTalkerTextTopKRouter": _SOFTMAX_FLAG,
    "Qwen4ExpTextTopKRouter": _SOFTMAX_FLAG,
    "OlmoeTopKRouter": _SOFTMAX_FLAG,
    "FlexOlmoTopKRouter": _SOFTMAX_FLAG,
    "MellumTopKRouter": _SOFTMAX_FLAG,
    "JambaTopKRouter": Rule(),
    "DeepseekV2TopkRouter": _DEEPSEEK_V2,
    "DeepseekOcr2TextTopkRouter": _DEEPSEEK_V2,
    "UnlimitedOcrTextTopkRouter": _DEEPSEEK_V2,
    "Mistral4TopkRouter": Rule(
        groups="top2", group_fill=0.0, normalise="norm_topk_prob", eps=1e-20, scale="routed_scaling_factor"
    ),
    "MistralLarge4TextTopkRouter": Rule(
        groups="top2", group_fill=0.0, normalise=True, eps=1e-20, scale="routed_scaling_factor"
    ),
    "LongcatFlashTopkRouter": Rule(
        bias="e_score_correction_bias", scale="routed_scaling_factor", weight="classifier.weight"
    ),
    "Ernie4_5_MoeTopKRouter": Rule(bias="moe_statics.e_score_correction_bias", normalise=True),
    "Ernie4_5_VLMoeMoeTopKRouter": Rule(bias="moe_statics.e_score_correction_bias", normalise=True),
    "Gemma4TextRouter": _GEMMA,
    "DiffusionGemmaTextRouter": _GEMMA,
    # sigmoid
    **dict.fromkeys(
        [
            "DeepseekV3TopkRouter",
            "DeepseekV32TopkRouter",
            "AXK1TopkRouter",
            "BailingHybridTopkRouter",
            "Dots1TopkRouter",
            "ExaoneMoeTopkRouter",
            "Glm4MoeTopkRouter",
            "Glm4MoeLiteTopkRouter",
            "Glm4vMoeTextTopkRouter",
            "Glm5NextTextTopkRouter",
            "GlmMoeDsaTopkRouter",
            "HYV4TopkRouter",
            "KimiLinearTopkRouter",
            "MiMoV2FlashTopkRouter",
            "NemotronHTopkRouter",
            "SolarOpenTopkRouter",
        ],
        _DEEPSEEK_V3,
    ),
    "AXK2TopkRouter": Rule(
        score="sigmoid",
        bias="e_score_correction_bias",
        groups="top2",
        group_fill=0.0,
        normalise="norm_topk_prob",
        eps=1e-20,
        scale="routed_scaling_factor",
    ),
    "BeamTopKRouter": Rule(
        score="sigmoid", bias="e_score_correction_bias", groups="top2", normalise="norm_topk_prob", eps=1e-20
    ),
    "MiniMaxM2TopKRouter": _SIGMOID_BIAS,
    "MiniMaxM3VLTopKRouter": _SIGMOID_BIAS,
    "Step3p7TopKRouter": _SIGMOID_BIAS,
    "LagunaTopKRouter": Rule(score="sigmoid", bias="e_score_correction_bias", normalise=True, weight=None),
    "HYV3TopKRouter": Rule(
        score="sigmoid", bias="e_score_correction_bias", normalise=True, eps=1e-20, scale="router_scaling_factor"
    ),
    "AfmoeTokenChoiceRouter": Rule(
        score="sigmoid", bias="expert_bias", normalise=True, eps=1e-20, scale="route_scale", weight="gate.weight"
    ),
    "Lfm2MoeTopKRouter": Rule(
        score="sigmoid", bias="expert_bias", normalise="norm_topk_prob", eps=1e-6, scale="routed_scaling_factor"
    ),
    "FlintTopKRouter": Rule(score="sigmoid", normalise="norm_topk_prob"),
    "Kolibri1TopKRouter": Rule(
        score="sigmoid", choose="logit", bias="e_score_correction_bias", normalise="norm_topk_prob"
    ),
    "Llama4Router": Rule(score="sigmoid", choose="logit", returns="dense"),
    # by configuration
    "Cohere2MoeTopKRouter": Rule(score="expert_selection_fn", choose="logit", normalise="norm_topk_prob"),
    "DeepseekV4TopKRouter": Rule(
        score="score_fn",
        bias="e_score_correction_bias",
        normalise=True,
        eps=1e-20,
        scale="routed_scaling_factor",
    ),
    "MuseSparkTopkRouter": Rule(
        score="scoring_function",
        bias="e_score_correction_bias",
        normalise=True,
        eps="norm_topk_prob_eps",
        scale="routed_scaling_factor",
        weight=None,
    ),
    # sparsemixer
    "PhimoeTopKRouter": Rule(choose="logit", mixer=True),
}

REFUSED: dict[str, str] = {
    "DeepseekV4HashRouter": "experts are looked up by token id, so there is no routing decision to be uncertain about",
    "DbrxRouter": "it returns logits alone, and the block around it chooses the experts",
    "JetMoeTopKGating": "it returns tokens sorted by expert for a grouped dispatch",
    "NllbMoeTop2Router": "it returns capacity-limited dispatch masks",
    "SwitchTransformersTop1Router": "it returns capacity-limited dispatch masks",
    "InklingTopkRouter": "routed and shared experts are normalised together, so their weights cannot be set apart",
    "ZayaRouter": "one of its classes skips the experts and its state passes between layers",
}

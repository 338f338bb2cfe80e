//! The core knows no ABI: it exports no symbol, and none of its texts contains a name that callers use.

#![allow(clippy::unwrap_used)] // A test.

mod sources;

/// Words that only an ABI has: names of its functions, parameters, fields and tags.
const ABI_WORDS: [&str; 13] = [
    "ncclEp",
    "inputs[",
    "outputs[",
    "local_tensors",
    "topk_idx",
    "send_only",
    "ep_group",
    "alloc_fn",
    "num_experts",
    "max_tokens_per_rank",
    "token_size_bytes",
    "TOKENS",
    "config.",
];

#[test]
fn the_core_has_no_words_of_an_abi() {
    // The prefix of the stand-ins' own functions, which are not the library's.
    let stand_ins = "ncclEpHostsim";
    for file in sources::files("src", &[".rs"]) {
        let source = sources::read(&file);
        assert!(!source.contains("no_mangle"), "{file} exports a symbol");
        let named = source.replace(stand_ins, "").contains("ncclEp");
        assert!(!named, "{file} names a function of an ABI");
        let literals = sources::string_literals(sources::parsed(&file), "");
        for literal in literals.iter().filter(|it| !it.starts_with(stand_ins)) {
            let word = ABI_WORDS.iter().find(|word| literal.contains(**word));
            assert_eq!(word, None, "{file} says {literal:?}");
        }
    }
}

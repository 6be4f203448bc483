//! Comments of the product say plainly what they mean. Some forms of a sentence rarely do: "what" for a noun, "whoever",
//! "nobody", "so many", "one that", or "has it done".

use std::fs;
use std::path::{Path, PathBuf};

/// Lines of comments with such a form. May be lowered, not raised: rewrite the sentence with the noun that it is about.
const MOST: usize = 49;

/// The packages of the product.
const PACKAGES: [&str; 8] = [
    "api",
    "proto",
    "model",
    "control",
    "shim",
    "server",
    "device-plugin",
    "signatures",
];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            found.push(path);
        }
    }
}

/// Whether a comment has one of the forms.
fn is_riddle(comment: &str) -> bool {
    let lower = comment.to_lowercase();
    let words: Vec<&str> = lower
        .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
        .collect();
    let single = ["what", "whoever", "nobody", "somebody"];
    let pairs = [
        ("so", "many"),
        ("those", "who"),
        ("those", "that"),
        ("one", "that"),
        ("one", "who"),
    ];
    words.iter().any(|word| single.contains(word))
        || words
            .windows(2)
            .any(|two| pairs.contains(&(two[0], two[1])))
        || words
            .windows(3)
            .any(|three| three[0] == "has" && matches!(three[1], "it" | "them"))
        || lower.contains(", who ")
}

#[test]
fn forms_are_found() {
    assert!(is_riddle("What is written there the next one finds."));
    assert!(is_riddle("A session, who waits"));
    assert!(is_riddle("Has it decided whether it stays."));
    assert!(!is_riddle("Whether the session has work in flight."));
    assert!(!is_riddle("somewhat"));
}

#[test]
fn comments_with_the_form_of_a_riddle_become_fewer() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    for package in PACKAGES {
        sources(&root.join(package).join("src"), &mut files);
    }
    let mut found = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).expect("a source");
        let comments = text.lines().enumerate();
        for (number, line) in comments.filter(|(_, line)| line.trim_start().starts_with("//")) {
            if is_riddle(line) {
                let name = file.strip_prefix(&root).expect("a prefix");
                found.push(format!(
                    "{}:{}: {}",
                    name.display(),
                    number + 1,
                    line.trim()
                ));
            }
        }
    }
    assert!(
        found.len() <= MOST,
        "{} comments have the form of a riddle, more than {MOST}:\n{}",
        found.len(),
        found.join("\n")
    );
}

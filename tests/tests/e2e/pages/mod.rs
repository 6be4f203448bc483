//! The documents for users, taken apart: what is in blocks of code, and between backticks.

pub mod elsewhere;
pub mod lines;
pub mod reader;
pub mod sandbox;

use pulldown_cmark::{CodeBlockKind, Event, HeadingLevel, Options, Parser, Tag, TagEnd};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

pub struct Page {
    /// Path from the project's root.
    pub name: String,
    pub text: String,
    pub pieces: Vec<Piece>,
    /// Where its links lead, as written.
    pub links: Vec<String>,
    /// What a link can name behind `#`.
    pub anchors: BTreeSet<String>,
}

/// Something in the typeface of a computer.
pub struct Piece {
    /// The last heading before it.
    pub section: String,
    pub text: String,
    pub place: In,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum In {
    Block,
    Text,
    /// A cell of a table, counted from 0.
    Column(usize),
}

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A file of the project.
pub fn file(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

impl Page {
    pub fn read(name: &str) -> Page {
        let text = file(name);
        let mut page = Page {
            name: name.to_owned(),
            pieces: Vec::new(),
            links: Vec::new(),
            anchors: BTreeSet::new(),
            text: String::new(),
        };
        let (mut heading, mut block): (Option<String>, Option<String>) = (None, None);
        let mut section = String::new();
        let mut place = In::Text;
        for event in Parser::new_ext(&text, Options::ENABLE_TABLES) {
            match event {
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(level)) => {
                    section = heading.take().expect("begun");
                    page.anchors.insert(anchor(&section));
                    // A page's own title is that of what comes before the first section.
                    if level == HeadingLevel::H1 {
                        section.clear();
                    }
                }
                Event::Start(Tag::CodeBlock(kind)) => {
                    block = Some(String::new());
                    if let CodeBlockKind::Fenced(language) = kind {
                        assert!(
                            language.is_empty() || &*language == "sh",
                            "{name}: {language}"
                        );
                    }
                }
                Event::End(TagEnd::CodeBlock) => page.pieces.push(Piece {
                    section: section.clone(),
                    text: block.take().expect("begun"),
                    place: In::Block,
                }),
                Event::Start(Tag::TableHead | Tag::TableRow) => place = In::Column(0),
                Event::End(TagEnd::TableCell) => {
                    if let In::Column(number) = &mut place {
                        *number += 1;
                    }
                }
                Event::End(TagEnd::TableHead | TagEnd::TableRow) => place = In::Text,
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    page.links.push(dest_url.into_string());
                }
                Event::Text(words) => {
                    if let Some(text) = block.as_mut().or(heading.as_mut()) {
                        *text += &words;
                    }
                }
                Event::Code(words) => match heading.as_mut() {
                    Some(text) => *text += &words,
                    None => page.pieces.push(Piece {
                        section: section.clone(),
                        text: words.into_string(),
                        place,
                    }),
                },
                _ => {}
            }
        }
        page.text = text;
        page
    }
}

/// What a heading is called in a link, as GitHub makes it.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter_map(|letter| match letter {
        ' ' => Some('-'),
        '-' | '_' => Some(letter),
        _ => letter
            .is_alphanumeric()
            .then(|| letter.to_ascii_lowercase()),
    });
    kept.collect()
}

/// Where a link from that page leads, from the project's root.
pub fn target(page: &str, link: &str) -> String {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in link.split('/') {
        match part {
            ".." => {
                parts.pop().expect("inside of the project");
            }
            "." => {}
            _ => parts.push(part),
        }
    }
    parts.join("/")
}

/// The pages that docs/README.md lists for operators, those of the examples, and those in the project's root.
pub fn for_users() -> Vec<Page> {
    let list = file("docs/README.md");
    let (_, list) = list
        .split_once("\nFor operators:\n")
        .expect("a list for operators");
    let (list, _) = list
        .split_once("\nFor developers:\n")
        .expect("a list for developers");
    let mut names: Vec<String> = Vec::new();
    for event in Parser::new(list) {
        if let Event::Start(Tag::Link { dest_url, .. }) = event {
            let (path, _) = dest_url.split_once('#').unwrap_or((&dest_url, ""));
            let name = target("docs/README.md", path);
            if name.ends_with(".md") && !names.contains(&name) {
                names.push(name);
            }
        }
    }
    let beside = [
        "README.md",
        "SECURITY.md",
        "examples/README.md",
        "examples/mpi/README.md",
    ];
    names.extend(beside.map(str::to_owned));
    names.iter().map(|name| Page::read(name)).collect()
}

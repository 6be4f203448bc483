//! The commands of a document, and whether what [`ELSEWHERE`] says of them is so.

use super::elsewhere::Way::*;
use super::elsewhere::{ELSEWHERE, Row, Way};
use super::{In, Page, Piece, file, root};
use mpsshim_control::commands::TABLE;

/// Programs with whose names a command between backticks begins. Those of the system, such as `ls -l`, are not
/// looked at.
const PROGRAMS: &[&str] = &[
    "mps-control",
    "mps-server",
    "mps-run",
    "mps-device-plugin",
    "nbody",
    "mpirun",
    "docker",
    "kubectl",
    "kustomize",
    "systemctl",
    "apt",
    "apt-get",
    "cargo",
    "srun",
    "salloc",
];
/// What a path begins with between backticks that is run.
const FOLDERS: &[&str] = &["./", "scripts/", "tests/gpu/", "benches/"];

/// One command of a document.
pub struct Line<'a> {
    pub page: &'a str,
    pub section: &'a str,
    /// Without the comment behind it.
    pub text: String,
    pub comment: String,
    /// Its row in [`ELSEWHERE`].
    pub row: Option<&'static Row>,
}

impl Line<'_> {
    pub fn way(&self) -> Option<Way> {
        self.row.map(|(_, _, way)| *way)
    }

    /// Not by itself, but with all others of a section.
    fn of_section(&self) -> bool {
        self.row.is_some_and(|(_, key, _)| key.starts_with("## "))
    }

    pub fn wrong<T>(&self, why: &str) -> Result<T, String> {
        let Line { page, section, .. } = self;
        Err(format!("{page}, {section:?}: `{}`: {why}", self.text))
    }
}

fn without_comment(line: &str) -> (String, String) {
    let (text, comment) = line.split_once(" # ").unwrap_or((line, ""));
    (text.trim_end().to_owned(), comment.trim().to_owned())
}

/// Whether what stands between backticks is a command, and not a name, an option or a value.
fn is_command(page: &str, piece: &Piece) -> bool {
    let mut words = piece.text.split_whitespace().peekable();
    let mut settings = 0;
    while words.next_if(|word| is_setting(word)).is_some() {
        settings += 1;
    }
    let Some(program) = words.next() else {
        return false;
    };
    let more = words.next().is_some();
    let known = TABLE.iter().any(|row| row.name == program);
    // The list of the commands.
    let list = page == "docs/operations.md" && piece.section == "mps-control";
    let listed = list && piece.place == In::Column(0) && known;
    let path = FOLDERS.iter().any(|folder| program.starts_with(folder));
    listed || (more || settings > 0) && (known || path || PROGRAMS.contains(&program))
}

pub fn is_setting(word: &str) -> bool {
    let Some((name, _)) = word.split_once('=') else {
        return false;
    };
    let letter = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
    !name.is_empty() && name.bytes().all(letter)
}

/// All commands of a document, in its order.
pub fn commands<'a>(page: &'a Page) -> Vec<Line<'a>> {
    let rows = || ELSEWHERE.iter().filter(|(name, ..)| *name == page.name);
    let row = |text: &str| rows().find(|(_, key, _)| *key == text);
    let mut lines = Vec::new();
    let mut add =
        |piece: &'a Piece, (text, comment): (String, String), own: Option<&'static Row>| {
            let section = piece.section.as_str();
            let of_section = |key: &str| {
                let key = key.strip_prefix("## ")?.strip_prefix(section)?;
                Some(key.is_empty() || text.starts_with(key.strip_prefix('\n')?))
            };
            // Tests that take commands out of a section take its blocks.
            let all = match piece.place {
                In::Block => rows().find(|(_, key, _)| of_section(key) == Some(true)),
                _ => None,
            };
            lines.push(Line {
                page: &page.name,
                section,
                row: own.or(all),
                text,
                comment,
            });
        };
    for piece in &page.pieces {
        if piece.place != In::Block {
            if is_command(&page.name, piece) {
                let text = (piece.text.clone(), String::new());
                add(piece, text, row(&piece.text));
            }
            continue;
        }
        let (first, _) = without_comment(piece.text.lines().next().unwrap_or_default());
        let whole = row(&format!("{first}\n"));
        if whole.is_some() || first.starts_with("for ") {
            let text = piece.text.trim_end().to_owned();
            add(piece, (text, String::new()), whole);
            continue;
        }
        for line in piece.text.lines().filter(|line| !line.trim().is_empty()) {
            let parts = without_comment(line);
            let own = row(&parts.0);
            add(piece, parts, own);
        }
    }
    lines
}

/// Whether somebody else does it, as is said; `Err`: it is not so.
pub fn is_done_elsewhere(line: &Line<'_>) -> Result<bool, String> {
    if line.of_section() && !matches!(line.way(), Some(Test(_))) {
        return line.wrong("only a test can be that of a whole section");
    }
    match line.way() {
        None | Some(Then(_) | As(_)) => return Ok(false),
        Some(Test(name)) => {
            let (test, function) = name.split_once("::").expect("FILE::FUNCTION");
            let source = file(&format!("tests/tests/{test}"));
            if !source.contains(&format!("#[test]\nfn {function}()")) {
                return line.wrong(&format!("there is no test {name}"));
            }
            // It does not know of a command that comes later, unless it takes them out of the document.
            if line.of_section() && !source.contains(line.page) {
                return line.wrong(&format!("{name} does not read {}", line.page));
            }
        }
        Some(Lines(path)) => {
            let text = file(path);
            let has = |line: &str| text.lines().any(|one| one.contains(line.trim()));
            if !line.text.lines().all(has) {
                return line.wrong(&format!("{path} has other lines"));
            }
        }
        Some(Page(name)) => {
            let other = Page::read(name);
            let there = commands(&other)
                .iter()
                .any(|one| one.text == line.text && !matches!(one.way(), Some(Page(_) | Text(_))));
            if !there {
                return line.wrong(&format!("{name} does not have it"));
            }
        }
        Some(Text(what)) => eprintln!("`{}` of {}: {what}", line.text, line.page),
        Some(Needs(what)) => {
            eprintln!("`{}` of {} needs {what}", line.text, line.page);
            let words: Vec<&str> = line.text.split(' ').collect();
            for pair in words.windows(2).filter(|_| words[0] == "kubectl") {
                let name = match pair {
                    ["-n" | "-c", name] => Some(*name),
                    [_, word] => word.strip_prefix("daemonset/"),
                    _ => None,
                };
                let manifests = file("packaging/kubernetes/daemonset.yaml");
                if name.is_some_and(|name| !manifests.contains(&format!("name: {name}\n"))) {
                    return line.wrong("the manifests do not name all of it");
                }
            }
            for path in words.iter().filter(|word| word.starts_with("packaging/")) {
                if !root().join(path).exists() {
                    return line.wrong(&format!("there is no {path}"));
                }
            }
            // Of a program of the project its options can be looked at.
            let program = line.text.split(' ').next().expect("a word");
            if root().join(program).is_file() {
                let source = file(program);
                for option in line.text.split(' ').filter(|word| word.starts_with("--")) {
                    if !source.contains(&format!("\"{option}\"")) {
                        return line.wrong(&format!("{program} has no option {option}"));
                    }
                }
            }
        }
    }
    Ok(true)
}

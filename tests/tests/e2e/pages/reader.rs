//! Runs commands of documents, and looks at what they print.

use super::elsewhere::Way::{As, Then};
use super::lines::{Line, is_setting};
use super::sandbox::Sandbox;
use mpsshim_control::commands::TABLE;

/// What a command prints, with `#` for each number and `…` for anything: what documents say of it.
const PRINTED: &[(&str, &str)] = &[
    ("get_server_list", "#\n"),
    ("get_server_status PID", "ACTIVE\n"),
    ("get_client_list PID", "#\n"),
    ("get_device_client_list", "[#] #:#.#, …\n#.#\n"),
    ("ps", "PID…ID…SERVER…DEVICE…NAMESPACE…COMMAND…\n#…"),
    ("top --once", "…#…client…\n"),
    ("terminate_client", "#\n"),
    ("start_server", ""),
    ("get_default_active_thread_percentage", "#.#\n"),
    ("set_default_active_thread_percentage", "#.#\n"),
    ("set_active_thread_percentage_all P", "# #.#\n"),
    ("trace stop", "# slices, # lost, in @place/trace.json\n"),
    ("--format csv", "…,…\n…,…\n"),
    ("--format=csv", "…,…\n…,…\n"),
    ("--format json", "[{…}]\n"),
    ("MPSSHIM_LOG=info mps-run", "…connected session=…"),
    ("get_default_quantum", "#…\n"),
];

/// What is run without being asked for in [`super::elsewhere`].
const OURS: &[&str] = &[
    "mps-control",
    "mps-run",
    "mps-server",
    "nbody",
    "./nbody",
    "./program",
    "./batch",
    "echo",
    "for",
    "do",
    "done",
    "$program",
];

/// A document's commands, run one after the other in one place as long as that can serve.
#[derive(Default)]
pub struct Reader {
    shared: Option<Sandbox>,
    pub count: usize,
}

impl Reader {
    pub fn run(&mut self, line: &Line<'_>) -> Result<(), String> {
        let mut variants = variants(&line.text).into_iter();
        variants.try_for_each(|text| self.run_variant(line, &text))
    }

    fn run_variant(&mut self, line: &Line<'_>, text: &str) -> Result<(), String> {
        if line.row.is_none() && !is_ours(text) {
            return line.wrong(
                "only programs of the project are run here: say in ELSEWHERE what becomes of it",
            );
        }
        self.count += 1;
        let words: Vec<&str> = text.split_whitespace().collect();
        // What starts a daemon must find none.
        let own = ["-d", "mps-run"].iter().any(|word| words.contains(word));
        let own = own.then(Sandbox::new);
        let sandbox = match &own {
            Some(sandbox) => sandbox,
            None => {
                if !self.shared.as_ref().is_some_and(Sandbox::is_ready) {
                    self.shared = Some(Sandbox::with_daemon());
                }
                self.shared.as_mut().expect("just made")
            }
        };
        let mut asked = match line.way() {
            Some(As(other)) => other.to_owned(),
            Some(Then(next)) => format!("{text} && {next}"),
            _ => text.to_owned(),
        };
        if TABLE.iter().any(|row| row.name == words[0]) {
            asked = format!("mps-control {asked}");
        }
        let before = sandbox.clients_so_far();
        let mut shell = sandbox.translated(&asked);
        // A trace can be ended that was begun, and begun when there is none.
        let trace = sandbox.place.path().join("trace.json");
        let start = format!("mps-control trace start {} 2>&1", trace.display());
        if asked.contains("trace start") {
            sandbox.shell("mps-control trace stop");
        } else if asked.contains("trace stop") {
            sandbox.shell(&start);
        }
        // They wait for the clients.
        let waits = asked.contains("quit") || asked.contains("shutdown_server");
        if waits && !asked.contains(" -t ") && !asked.contains(" -f") {
            let client = &sandbox.client.as_ref().expect("a shared place").0;
            shell = format!(
                "(sleep 0.2; kill {}) & {shell}; status=$?; wait; exit $status",
                client.pid()
            );
        }
        // Its client has a graph, and is ended.
        if asked.contains("restart_server") && !asked.contains(" -f") {
            shell += " -f";
        }
        let done = sandbox.shell(&shell);
        if done.code != 0 {
            return line.wrong(&format!(
                "{shell}: status {}: {}{}",
                done.code, done.out, done.err
            ));
        }
        if let Some(inner) = on_standard_input(&asked) {
            // Of what fails there mps-control's status says nothing.
            let inner = sandbox.translated(inner);
            let again = sandbox.shell(&format!("mps-control {inner}"));
            let quits = inner == "quit";
            if (again.code == 0) == quits {
                return line.wrong(&format!("{inner}: {}{}", again.out, again.err));
            }
        }
        let printed = format!("{}{}", done.out, done.err);
        let mut expected: Vec<String> = Vec::new();
        // The longest that fits says the most.
        let known = PRINTED.iter().filter(|(part, _)| said_by(part, &asked));
        expected.extend(
            known
                .max_by_key(|(part, _)| part.len())
                .map(|(_, shape)| sandbox.with_values(shape)),
        );
        // A comment that begins with a number is what the command prints.
        if line
            .comment
            .starts_with(|letter: char| letter.is_ascii_digit())
        {
            expected.push(sandbox.translated(&line.comment) + "\n");
        }
        for shape in expected {
            if !fits(&numbers_as_signs(&printed), &numbers_as_signs(&shape)) {
                return line.wrong(&format!("it printed {printed:?}, not as {shape:?}"));
            }
        }
        let program = ["./nbody", "./program", "./batch"]
            .iter()
            .any(|name| asked.contains(name));
        let served = asked.contains("LD_PRELOAD=") || asked.contains("mps-run ");
        if program && served && sandbox.clients_so_far() == before {
            return line.wrong(&format!("{shell}: the program was not served: {printed}"));
        }
        Ok(())
    }
}

/// What is given to mps-control by a pipe.
fn on_standard_input(command: &str) -> Option<&str> {
    let words = command
        .strip_prefix("echo ")?
        .strip_suffix(" | mps-control")?;
    Some(words.trim_matches('"'))
}

/// Whether nothing is started that does something to the machine.
fn is_ours(command: &str) -> bool {
    command.split(['|', ';', '&', '\n']).all(|part| {
        let mut words = part.split_whitespace().skip_while(|word| is_setting(word));
        let Some(program) = words.next() else {
            return true;
        };
        let known = TABLE.iter().any(|row| row.name == program);
        known || OURS.contains(&program)
    })
}

/// Whether a command is the one that is meant: the words, at the command's end or before a space.
fn said_by(part: &str, command: &str) -> bool {
    let translated = command.trim();
    translated.match_indices(part).any(|(at, _)| {
        let before = translated[..at].chars().next_back();
        let after = translated[at + part.len()..].chars().next();
        before.is_none_or(|letter| letter == ' ') && after.is_none_or(|letter| letter == ' ')
    })
}

/// `[…]` left out, and put in.
fn variants(text: &str) -> Vec<String> {
    let is_usage = TABLE
        .iter()
        .any(|row| text.split(' ').next() == Some(row.name));
    if !is_usage || !text.contains('[') {
        return vec![text.to_owned()];
    }
    let mut without = String::new();
    let mut depth = 0;
    for letter in text.chars() {
        match letter {
            '[' => depth += 1,
            ']' => depth -= 1,
            _ if depth == 0 => without.push(letter),
            _ => {}
        }
    }
    let with = text.replace(['[', ']'], "");
    vec![without.trim_end().to_owned(), with]
}

fn numbers_as_signs(text: &str) -> String {
    let mut out = String::new();
    for letter in text.chars() {
        match letter {
            '0'..='9' | '#' if out.ends_with('#') => {}
            '0'..='9' => out.push('#'),
            _ => out.push(letter),
        }
    }
    out
}

/// Whether a text has this shape, in which `…` stands for anything.
fn fits(text: &str, shape: &str) -> bool {
    let mut parts = shape.split('…');
    let first = parts.next().expect("at least one part");
    let Some(mut rest) = text.strip_prefix(first) else {
        return false;
    };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else {
        return rest.is_empty();
    };
    for part in middle {
        let Some(at) = rest.find(part) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

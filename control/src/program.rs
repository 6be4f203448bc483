//! The program that a process runs: the unit of the quarantine list.
//!
//! A program is an executable together with its user; for an interpreter, also the script, module or code.

pub mod readers;

use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::cmp::Ordering;
use std::fmt;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Bytes of a command line that are read.
const COMMAND_LINE: u64 = 4096;
/// Longest name of a program, bytes; the end of a longer name is replaced by a hash.
pub const LONGEST: usize = 1024;
/// Workers of Python's multiprocessing count as their parents' program; number of generations followed.
const GENERATIONS: usize = 4;

/// A program of a user.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Program {
    /// User of the processes.
    pub uid: u32,
    /// Path of the executable; for an interpreter, followed by the script, module or code.
    pub name: String,
}

/// Description of a process from its /proc files, as far as they can be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// The first word of its command line: the program as it was called.
    pub command: Option<String>,
    /// Its program.
    pub program: Option<Program>,
}

impl Identity {
    /// Reads it for a process of this user. The process can make it block without end, since the kernel reads a command
    /// line from the memory of the process: only [`readers`] call it.
    fn of_process(pid: i32, uid: u32) -> Identity {
        let line = command_line(pid);
        Identity {
            command: line.as_deref().and_then(first_word),
            program: Program::of_process(pid, uid, line),
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of user {}", self.name, self.uid)
    }
}

impl Program {
    /// A program as named by an operator, without characters that would garble a terminal or a table.
    pub fn named(uid: u32, name: &str) -> Program {
        let words = name.split_whitespace().collect::<Vec<_>>().join(" ");
        let mut name: String = words.chars().filter(|c| !c.is_control()).collect();
        if name.len() > LONGEST {
            let hash = format!("…{:016x}", hash(name.as_bytes()));
            while name.len() > LONGEST - hash.len() {
                name.pop();
            }
            name.push_str(&hash);
        }
        Program { uid, name }
    }

    /// Whether it can be a result of [`Program::named`].
    pub fn is_sound(&self) -> bool {
        !self.name.is_empty() && *self == Program::named(self.uid, &self.name)
    }

    /// The program of a process of this user with this command line; `None` if it cannot be determined.
    fn of_process(pid: i32, uid: u32, line: Option<Vec<u8>>) -> Option<Program> {
        let (mut pid, mut line) = (pid, line);
        for _ in 0..GENERATIONS {
            let folder = format!("/proc/{pid}");
            // The process id may have been reused for another user's process.
            let is_theirs = pid > 0 && fs::metadata(&folder).ok()?.uid() == uid;
            is_theirs.then_some(())?;
            let executable = fs::read_link(format!("{folder}/exe")).ok()?;
            let executable = executable.to_string_lossy().into_owned();
            // For any other executable the arguments are not needed.
            let arguments = match interpreter(&executable).is_some() {
                true => arguments(&line?),
                false => Vec::new(),
            };
            if !is_worker(&executable, &arguments) {
                let directory = fs::read_link(format!("{folder}/cwd")).unwrap_or_default();
                let name = identify(&executable, &arguments, &directory);
                return Some(Program::named(uid, &name));
            }
            pid = parent(&folder)?;
            line = command_line(pid);
        }
        None
    }
}

/// A command line as sent to the daemon: in `quarantine add PROGRAM`, the executable's path is resolved to the path
/// that the kernel reports, without symbolic links, and paths of other existing files are made absolute from this
/// process's directory.
pub fn with_real_paths(line: &str) -> Cow<'_, str> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let behind = match words.as_slice() {
        ["quarantine", "add", "-uid", _, ..] => 4,
        ["quarantine", "add", ..] => 2,
        _ => return Cow::Borrowed(line),
    };
    let real = |(at, word): (usize, &&str)| {
        // Only the executable is resolved; the name of a program keeps the path of a script as given.
        let path = match at.cmp(&behind) {
            Ordering::Less => None,
            Ordering::Equal => fs::canonicalize(word).ok(),
            Ordering::Greater => {
                let absolute = std::path::absolute(word).ok();
                absolute.filter(|path| path.is_file())
            }
        };
        path.map_or_else(|| (*word).to_owned(), |path| plain(&path))
    };
    let words: Vec<String> = words.iter().enumerate().map(real).collect();
    Cow::Owned(words.join(" "))
}

/// The beginning of a process's command line.
fn command_line(pid: i32) -> Option<Vec<u8>> {
    let mut line = Vec::new();
    let file = File::open(format!("/proc/{pid}/cmdline")).ok()?;
    file.take(COMMAND_LINE).read_to_end(&mut line).ok()?;
    Some(line)
}

/// The first word of a command line, without characters that would garble a table; `None`: it is empty.
fn first_word(line: &[u8]) -> Option<String> {
    let first = line.split(|byte| *byte == 0).next().unwrap_or_default();
    let text = String::from_utf8_lossy(first);
    let text: String = text.chars().filter(|c| !c.is_control()).collect();
    (!text.is_empty()).then_some(text)
}

fn hash(bytes: &[u8]) -> u64 {
    // Gives the same result in every process.
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

fn arguments(line: &[u8]) -> Vec<String> {
    let line = line.strip_suffix(&[0]).unwrap_or(line);
    let words = line.split(|byte| *byte == 0);
    words
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect()
}

/// The parent in /proc/PID/stat: behind the name, which may contain anything.
fn parent(folder: &str) -> Option<i32> {
    let stat = fs::read_to_string(format!("{folder}/stat")).ok()?;
    let (_, behind) = stat.rsplit_once(')')?;
    behind.split_whitespace().nth(1)?.parse().ok()
}

/// Properties of an interpreter: the options that precede its script, module or code.
struct Interpreter {
    /// Beginning of the executable's name, up to its version.
    name: &'static str,
    /// Letters of options that are followed by code.
    code: &'static str,
    /// Letters of options that are followed by the name of a module.
    module: &'static str,
    /// Letters of options that are followed by a value.
    value: &'static str,
    /// Long options, and Java's with one dash, that are followed by a value.
    long: &'static [&'static str],
    /// Long options that are followed by code, or by the file.
    long_code: &'static [&'static str],
}

const NO_OPTIONS: Interpreter = Interpreter {
    name: "",
    code: "",
    module: "",
    value: "",
    long: &[],
    long_code: &[],
};

const PYTHON: Interpreter = Interpreter {
    name: "python",
    code: "c",
    module: "m",
    value: "WX",
    long: &["--check-hash-based-pycs"],
    ..NO_OPTIONS
};

const SHELL: Interpreter = Interpreter {
    code: "c",
    value: "oO",
    long: &["--rcfile", "--init-file"],
    ..NO_OPTIONS
};

const INTERPRETERS: &[Interpreter] = &[
    PYTHON,
    Interpreter {
        name: "pypy",
        ..PYTHON
    },
    Interpreter {
        name: "julia",
        code: "eE",
        value: "LJCtpHOg",
        long: &["--project", "--threads", "--sysimage"],
        long_code: &["--eval", "--print"],
        ..NO_OPTIONS
    },
    Interpreter {
        name: "Rscript",
        code: "e",
        long: &["--default-packages"],
        ..NO_OPTIONS
    },
    Interpreter {
        name: "R",
        code: "e",
        value: "gd",
        ..NO_OPTIONS
    },
    Interpreter {
        name: "node",
        code: "ep",
        value: "rC",
        long: &["--require", "--import", "--loader", "--conditions"],
        long_code: &["--eval", "--print"],
        ..NO_OPTIONS
    },
    Interpreter {
        name: "perl",
        code: "eE",
        value: "I",
        ..NO_OPTIONS
    },
    Interpreter {
        name: "ruby",
        code: "e",
        value: "rIC",
        ..NO_OPTIONS
    },
    Interpreter {
        name: "java",
        long: &[
            "-cp",
            "-classpath",
            "--class-path",
            "-p",
            "--module-path",
            "--add-modules",
            "--add-opens",
            "--add-exports",
        ],
        ..NO_OPTIONS
    },
    Interpreter {
        name: "lua",
        code: "e",
        value: "l",
        ..NO_OPTIONS
    },
    Interpreter {
        name: "bash",
        ..SHELL
    },
    Interpreter {
        name: "dash",
        ..SHELL
    },
    Interpreter {
        name: "sh",
        ..SHELL
    },
];

fn interpreter(executable: &str) -> Option<&'static Interpreter> {
    let file = Path::new(executable).file_name()?.to_str()?;
    // "3.13t" is Python without its lock.
    let is_version = |rest: &str| {
        let rest = rest
            .strip_suffix('t')
            .filter(|rest| !rest.is_empty())
            .unwrap_or(rest);
        rest.chars().all(|c| c.is_ascii_digit() || ".-".contains(c))
    };
    INTERPRETERS
        .iter()
        .find(|one| file.strip_prefix(one.name).is_some_and(is_version))
}

/// The program given to an interpreter.
#[derive(Debug, PartialEq, Eq)]
enum Runs<'a> {
    Script(&'a str),
    Module(&'a str),
    Code(&'a str),
    /// None: it reads from standard input or interactively.
    Nothing,
}

fn runs<'a>(interpreter: &Interpreter, arguments: &'a [String]) -> Runs<'a> {
    let mut words = arguments.iter().skip(1).map(String::as_str);
    while let Some(word) = words.next() {
        if word == "-jar" && interpreter.name == "java" || word == "--" {
            return words.next().map_or(Runs::Nothing, Runs::Script);
        }
        if word == "-" {
            return Runs::Nothing;
        }
        if interpreter.long.contains(&word) {
            words.next();
            continue;
        }
        if interpreter.long_code.contains(&word) {
            return words.next().map_or(Runs::Nothing, Runs::Code);
        }
        if let Some(file) = word.strip_prefix("--file=") {
            return Runs::Script(file);
        }
        if word.starts_with("--") {
            continue;
        }
        let Some(letters) = word.strip_prefix('-') else {
            return Runs::Script(word);
        };
        for (at, letter) in letters.char_indices() {
            let rest = &letters[at + letter.len_utf8()..];
            let mut value = || match rest {
                "" => words.next(),
                rest => Some(rest),
            };
            if interpreter.code.contains(letter) {
                return value().map_or(Runs::Nothing, Runs::Code);
            }
            if interpreter.module.contains(letter) {
                return value().map_or(Runs::Nothing, Runs::Module);
            }
            if interpreter.value.contains(letter) {
                value();
                break;
            }
        }
    }
    Runs::Nothing
}

/// A worker started by Python's multiprocessing; its code argument differs from worker to worker.
fn is_worker(executable: &str, arguments: &[String]) -> bool {
    let Some(interpreter) = interpreter(executable) else {
        return false;
    };
    let code = runs(interpreter, arguments);
    matches!(code, Runs::Code(code) if code.starts_with("from multiprocessing."))
}

fn identify(executable: &str, arguments: &[String], directory: &Path) -> String {
    // It may have been replaced since it was started.
    let executable = executable.strip_suffix(" (deleted)").unwrap_or(executable);
    let Some(interpreter) = interpreter(executable) else {
        return executable.to_owned();
    };
    match runs(interpreter, arguments) {
        // A class has no path.
        Runs::Script(class) if interpreter.name == "java" && !class.ends_with(".jar") => {
            format!("{executable} {class}")
        }
        Runs::Script(path) => format!("{executable} {}", plain(&directory.join(path))),
        Runs::Module(module) => format!("{executable} -m {module}"),
        Runs::Code(code) => format!("{executable} -c {:016x}", hash(code.as_bytes())),
        Runs::Nothing => executable.to_owned(),
    }
}

/// Removes `.` and `..` by text alone, without accessing a file system that may not answer.
fn plain(path: &Path) -> String {
    use std::path::Component;
    let mut plain = std::path::PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                plain.pop();
            }
            part => plain.push(part),
        }
    }
    plain.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(line: &[&str]) -> String {
        let arguments: Vec<String> = line.iter().map(|word| (*word).to_owned()).collect();
        identify(line[0], &arguments, Path::new("/home/ada/run"))
    }

    #[test]
    fn a_compiled_program_is_its_executable() {
        assert_eq!(name(&["/opt/nbody", "-n", "7"]), "/opt/nbody");
        assert_eq!(name(&["/opt/nbody (deleted)"]), "/opt/nbody");
        // Its name only starts like an interpreter's.
        assert_eq!(name(&["/opt/pythonic", "x.py"]), "/opt/pythonic");
        assert_eq!(name(&["/opt/Render", "x"]), "/opt/Render");
    }

    #[test]
    fn an_interpreter_is_what_it_runs() {
        for (line, expected) in [
            (&["/p/python3.11", "train.py"][..], "/home/ada/run/train.py"),
            (
                &["/p/python3", "-u", "-W", "ignore", "../x.py", "-c"],
                "/home/ada/x.py",
            ),
            (&["/p/python3", "-Xdev", "/a/./b.py"], "/a/b.py"),
            (
                &["/p/python3", "-um", "torch.run", "--x", "y"],
                "-m torch.run",
            ),
            (&["/p/python3", "-mpip"], "-m pip"),
            (
                &["/p/R", "--no-echo", "--file=fit.R"],
                "/home/ada/run/fit.R",
            ),
            (
                &["/p/java", "-Xmx1g", "-cp", "a:b", "org.x.Main", "1"],
                "org.x.Main",
            ),
            (&["/p/java", "-jar", "x.jar"], "/home/ada/run/x.jar"),
            (
                &["/p/julia", "--project=.", "-t", "4", "a.jl"],
                "/home/ada/run/a.jl",
            ),
            (&["/p/node", "-r", "x", "a.js"], "/home/ada/run/a.js"),
            (&["/p/perl", "-w", "--", "-x"], "/home/ada/run/-x"),
            (&["/p/bash", "-e", "job.sh"], "/home/ada/run/job.sh"),
        ] {
            assert_eq!(name(line), format!("{} {expected}", line[0]), "{line:?}");
        }
        for line in [&["/p/python3"][..], &["/p/python3", "-"], &["/p/lua", "-i"]] {
            assert_eq!(name(line), line[0]);
        }
    }

    #[test]
    fn code_is_told_apart_by_its_hash() {
        let one = name(&["/p/python3", "-c", "import torch"]);
        assert!(
            one.starts_with("/p/python3 -c ") && one.len() == 14 + 16,
            "{one}"
        );
        assert_eq!(one, name(&["/p/python3", "-uc", "import torch", "7"]));
        assert_ne!(one, name(&["/p/python3", "-c", "import cupy"]));
        assert_ne!(one, name(&["/p/perl", "-e", "import torch"]));
    }

    #[test]
    fn workers_of_multiprocessing_are_told_from_other_code() {
        let words =
            |line: &[&str]| -> Vec<String> { line.iter().map(|word| (*word).to_owned()).collect() };
        let code = "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)";
        assert!(is_worker("/p/python3", &words(&["python", "-c", code])));
        assert!(!is_worker("/p/python3", &words(&["python", "-c", "x"])));
        assert!(!is_worker("/p/nbody", &words(&["python", "-c", code])));
    }

    #[test]
    fn the_program_of_a_process_is_found() {
        let (pid, uid) = (std::process::id() as i32, nix::unistd::geteuid().as_raw());
        let found = Identity::of_process(pid, uid);
        assert_eq!(found.command, std::env::args().next());
        let own = found.program.expect("this process");
        let executable = std::env::current_exe().expect("a path");
        assert_eq!(own.name, executable.display().to_string());
        assert_eq!(own.uid, uid);
        let theirs = Identity::of_process(pid, uid + 1);
        assert_eq!(theirs.program, None, "another user's");
        assert_eq!(Identity::of_process(0, uid), Identity::default());
        let stat = parent("/proc/self").expect("a parent");
        assert_eq!(stat, nix::unistd::getppid().as_raw());
    }

    #[test]
    fn a_program_as_it_was_called_fits_a_table() {
        assert_eq!(
            first_word(b"/a b\x1b[2J\n\0-x\0").as_deref(),
            Some("/a b[2J")
        );
        assert_eq!((first_word(b""), first_word(b"\n\0-x\0")), (None, None));
    }

    #[test]
    fn a_program_that_is_added_is_named_by_its_real_path() {
        let directory = tempfile::tempdir().expect("directory");
        let folder = directory.path().canonicalize().expect("real");
        let (real, link) = (folder.join("real"), folder.join("link"));
        fs::write(&real, "").expect("a file");
        std::os::unix::fs::symlink(&real, &link).expect("a link");
        let (real, link) = (real.display(), link.display());
        for option in ["", "-uid 7 "] {
            assert_eq!(
                with_real_paths(&format!("quarantine add {option}{link} -m {link}")),
                format!("quarantine add {option}{real} -m {link}")
            );
        }
        for line in [format!("quarantine release {link}"), "ps  -p 7".into()] {
            assert_eq!(with_real_paths(&line), line);
        }
    }

    #[test]
    fn names_are_bounded_and_fit_a_terminal() {
        let named = |text: &str| Program::named(7, text);
        assert_eq!(named(" /a  b\x1b[2J ").name, "/a b[2J");
        let long = "/é".repeat(LONGEST);
        assert!(named(&long).name.len() <= LONGEST);
        assert_ne!(named(&long), named(&format!("{long}x")));
        assert!(named(&long).is_sound() && named("/a b").is_sound());
        for text in ["", "/a  b", "/a\x1bb", &long] {
            let name = text.to_owned();
            assert!(!Program { uid: 7, name }.is_sound(), "{text}");
        }
    }
}

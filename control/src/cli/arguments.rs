//! The order of mps-control's arguments: options of the program may follow a command.

use super::Control;
use crate::commands::{self, FORMAT_OPTION, Kind};
use crate::modules;
use clap::{Arg, Command, CommandFactory};
use std::ffi::{OsStr, OsString};

/// Short options of the program that take a value.
const WITH_VALUE: [&str; 2] = ["-p", "-a"];
/// Short options of the program that no command has.
const SHORT: [&str; 3] = ["-h", "-v", "-V"];
/// NVIDIA's spellings of options, and the program's own.
const SPELLINGS: [(&str, &str); 2] = [
    ("-multiuser-server", "--multiuser-server"),
    ("--forground", "--foreground"),
];

/// Moves options of the program from behind the command to its front, and accepts NVIDIA's spellings.
/// Options of the command stay where they are, as does everything from `--` on.
pub fn options_first(mut arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut program = Control::command();
    program.build();
    let mut first: Vec<OsString> = arguments.next().into_iter().collect();
    let mut command = Vec::new();
    while let Some(argument) = arguments.next() {
        let is_option = argument.to_string_lossy().starts_with('-');
        if argument == "--" {
            command.push(argument);
            break;
        }
        let moves = match command.first() {
            None => is_option,
            Some(name) => is_option && is_of_program(&program, name, &argument),
        };
        if !moves {
            command.push(argument);
            continue;
        }
        let takes_value = value_follows(&program, &argument);
        let spelling = SPELLINGS.iter().find(|(theirs, _)| argument == *theirs);
        first.push(spelling.map_or(argument, |(_, ours)| (*ours).into()));
        if takes_value {
            // clap must not take the command for a missing value.
            let Some(value) = arguments.next() else {
                return first;
            };
            first.push(value);
        }
    }
    first.into_iter().chain(command).chain(arguments).collect()
}

/// The declaration of a long option, and whether its value is in the same word.
fn declared<'a>(program: &'a Command, argument: &OsStr) -> Option<(&'a Arg, bool)> {
    let text = argument.to_str()?.strip_prefix("--")?;
    let (name, attached) = match text.split_once('=') {
        Some((name, _)) => (name, true),
        None => (text, false),
    };
    let arg = program
        .get_arguments()
        .find(|arg| arg.get_long() == Some(name))?;
    Some((arg, attached))
}

fn value_follows(program: &Command, argument: &OsStr) -> bool {
    WITH_VALUE.iter().any(|short| argument == *short)
        || declared(program, argument)
            .is_some_and(|(arg, attached)| !attached && arg.get_action().takes_values())
}

/// Whether an option behind the command `name` is the program's.
fn is_of_program(program: &Command, name: &OsStr, argument: &OsStr) -> bool {
    // clap parses the arguments of its subcommands; only the format of a list is the program's.
    if let Some(own) = program.find_subcommand(name) {
        let format = Some(FORMAT_OPTION.trim_start_matches('-'));
        let is_format =
            declared(program, argument).is_some_and(|(arg, _)| arg.get_long() == format);
        return is_format && !own.has_subcommands();
    }
    // A module's commands have options of their own, `--help` among them.
    if name.to_str().and_then(modules::find).is_some() {
        return false;
    }
    let kind = name.to_str().and_then(commands::find).map(|row| row.kind);
    if kind == Some(Kind::Shows) && ["-h", "--help"].iter().any(|help| argument == *help) {
        return false;
    }
    if SHORT.iter().any(|short| argument == *short) {
        return true;
    }
    let Some((arg, _)) = declared(program, argument).filter(|(arg, _)| !arg.is_hide_set()) else {
        return false;
    };
    // The daemon refuses a format for a command that has no list.
    let is_format = arg.get_long() == Some(FORMAT_OPTION.trim_start_matches('-'));
    !is_format || matches!(kind, Some(Kind::Lists | Kind::Shows))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ordered(line: &str) -> String {
        let words = line.split(' ').map(OsString::from);
        let words = options_first(std::iter::once("mps-control".into()).chain(words));
        let words: Vec<_> = words
            .iter()
            .skip(1)
            .map(|word| word.to_string_lossy())
            .collect();
        words.join(" ")
    }

    #[test]
    fn options_of_the_program_come_first() {
        for (line, expected) in [
            ("ps --format json", "--format json ps"),
            ("ps -p 7 --format=csv", "--format=csv ps -p 7"),
            (
                "--config a ps --format json -p 7",
                "--config a --format json ps -p 7",
            ),
            (
                "get_client_list --config a 7",
                "--config a get_client_list 7",
            ),
            ("quit --config=a -t 5", "--config=a quit -t 5"),
            ("top --once --format json", "--format json top --once"),
            ("doctor -p 7 --format json", "--format json doctor -p 7"),
            ("ps -V", "-V ps"),
            (
                "-p 3 server list --format=csv",
                "-p 3 server list --format=csv",
            ),
            ("ps --help", "--help ps"),
            ("ps --format", "--format"),
            ("-a file -d", "-a file -d"),
            ("-multiuser-server -d", "--multiuser-server -d"),
            ("--forground -M", "--foreground -M"),
            (
                "--format json -multiuser-server",
                "--format json --multiuser-server",
            ),
        ] {
            assert_eq!(ordered(line), expected);
        }
    }

    #[test]
    fn options_of_commands_stay() {
        for line in [
            "shutdown_server 7 -f",
            "restart_server 7 -t 5 -f",
            "start_server -uid 0",
            "ps -p 7",
            "device_query --csv 7",
            "server list --help",
            "server --format=csv list",
            "top --help",
            "top -h",
            "top --interval 2 --json",
            "cdi generate --help",
            "cdi generate --format json",
            "doctor --help",
            "quit --format json",
            "frobnicate --format json",
            "ps --detached",
            "ps -- --format json",
            "ps -multiuser-server",
            "-- ps --format json",
        ] {
            assert_eq!(ordered(line), line);
        }
    }
}

//! Manual pages and completions.

use super::{Documents, RUN_FAILURE};
use crate::commands::{FORMAT_OPTION, Kind, Row, TABLE};
use crate::modules::{self, MODULES, Module, Verb};
use crate::settings;
use clap::{Arg, ArgAction, Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, italic, roman};
use std::collections::BTreeSet;
use std::io::{self, Write};

/// The program that has the daemon's commands.
const CONTROL: &str = "mps-control";

/// Prints the requested documentation; `false` if none was requested.
///
/// # Errors
/// Those of standard output.
pub fn print<P: CommandFactory>(asked: &Documents) -> io::Result<bool> {
    let mut text = Vec::new();
    if asked.man {
        manual(&P::command(), &mut text)?;
    } else if let Some(shell) = asked.completions {
        text = completions(&P::command(), shell);
    } else {
        return Ok(false);
    }
    io::stdout().write_all(&text)?;
    Ok(true)
}

fn has_commands(program: &Command) -> bool {
    program.get_name() == CONTROL
}

/// The manual page of a program, as troff.
///
/// # Errors
/// Those of `out`.
pub fn manual(program: &Command, out: &mut dyn Write) -> io::Result<()> {
    let mut program = program.clone();
    if has_commands(&program) {
        // clap_mangen leaves out aliases.
        program = program.mut_arg("version", |arg| arg.help("Print the version; -V as well"));
    }
    let program = &program;
    let page = Man::new(program.clone()).manual("mpsshim");
    page.render_title(out)?;
    page.render_name_section(out)?;
    page.render_synopsis_section(out)?;
    page.render_description_section(out)?;
    page.render_options_section(out)?;
    let mut roff = Roff::new();
    if has_commands(program) {
        commands(&mut roff);
        own_commands(&mut roff, program);
    }
    environment(&mut roff);
    exit_status(&mut roff, program.get_name());
    see_also(&mut roff, program.get_name());
    roff.to_writer(out)?;
    page.render_version_section(out)
}

fn commands(roff: &mut Roff) {
    roff.control("SH", ["COMMANDS"]);
    for row in TABLE {
        roff.control("TP", []);
        roff.text([bold(row.name), roman(" "), italic(row.arguments)]);
        roff.text([roman(row.meaning)]);
    }
    roff.control("SH", ["COMMANDS OF INTERFACE 3"]);
    for module in MODULES {
        for verb in module.verbs {
            roff.control("TP", []);
            let usage = modules::usage(module.name, verb);
            let name = format!("{} {}", module.name, verb.name);
            let rest = usage.strip_prefix(&name).unwrap_or_default().to_owned();
            roff.text([bold(name), italic(rest)]);
            roff.text([roman(verb.meaning)]);
        }
    }
    roff.control("PP", []);
    roff.text([roman("With -p 3 or CUDA_MPS_PROTOCOL_VERSION=3.")]);
    roff.control("PP", []);
    roff.text([
        roman("Commands that change something are reserved for root and the user who runs the daemon. Options of the program may follow a command; with commands read from standard input, lists accept "),
        bold(FORMAT_OPTION),
        roman(" table, csv or json. At the prompt, "),
        bold("exit"),
        roman(" leaves mps-control, and "),
        bold("quit"),
        roman(" asks before it ends the daemon."),
    ]);
}

fn own_commands(roff: &mut Roff, program: &Command) {
    roff.control("SH", ["COMMANDS WITHOUT A DAEMON"]);
    for group in program.get_subcommands() {
        if !group.has_subcommands() {
            own_command(roff, group.get_name(), group);
        }
        for command in group.get_subcommands() {
            let name = format!("{} {}", group.get_name(), command.get_name());
            own_command(roff, &name, command);
        }
    }
}

fn own_command(roff: &mut Roff, name: &str, command: &Command) {
    roff.control("TP", []);
    let mut words = vec![bold(format!("{name} "))];
    let options = command.get_arguments().filter(|arg| !arg.is_global_set());
    for (arg, long) in options.filter_map(|arg| Some((arg, arg.get_long()?))) {
        let value = arg.get_value_names().unwrap_or_default();
        let value = value.iter().map(|name| name.as_str()).collect::<String>();
        let short = arg.get_short().map(|short| format!("-{short}"));
        let option = short.unwrap_or_else(|| format!("--{long}"));
        words.extend([
            roman("["),
            bold(format!("{option} ")),
            italic(value),
            roman("]"),
        ]);
    }
    roff.text(words);
    let about = command.get_about().map(ToString::to_string);
    roff.text([roman(about.unwrap_or_default())]);
}

fn environment(roff: &mut Roff) {
    roff.control("SH", ["ENVIRONMENT"]);
    for setting in settings::TABLE {
        roff.control("TP", []);
        roff.text([bold(setting.name)]);
        roff.text([roman(format!(
            "{} Default: {}.",
            setting.meaning, setting.default
        ))]);
    }
}

fn exit_status(roff: &mut Roff, program: &str) {
    let text = match program {
        "mps-control" => {
            "0: success; for commands read from standard input also if one of them failed, as with NVIDIA's. 1: there is no \
             daemon, a daemon runs already or cannot start, a command given as arguments failed, or doctor has found an error. 2: unknown option or invalid value of one."
                .to_owned()
        }
        "mps-run" => format!(
            "The program's; 127 if there is no such program, 126 if it cannot be executed, {RUN_FAILURE} if mps-run \
             itself fails."
        ),
        "mps-device-plugin" => {
            "0: ended by a signal. 1: it cannot start, or kubelet refuses it. 2: unknown option.".to_owned()
        }
        _ => "0: ended as ordered. 1: it could not start or has lost its context.".to_owned(),
    };
    roff.control("SH", ["EXIT STATUS"]);
    roff.text([roman(text)]);
}

fn see_also(roff: &mut Roff, program: &str) {
    let others = ["mps-control", "mps-device-plugin", "mps-run", "mps-server"];
    let mut words: Vec<Inline> = Vec::new();
    for other in others.iter().filter(|other| **other != program) {
        if !words.is_empty() {
            words.push(roman(", "));
        }
        words.extend([bold(*other), roman("(1)")]);
    }
    roff.control("SH", ["SEE ALSO"]);
    roff.text(words);
}

/// The completion script for a shell; for mps-control it also completes the daemon's commands and their options.
pub fn completions(program: &Command, shell: Shell) -> Vec<u8> {
    let name = program.get_name().to_owned();
    let mut described = program.clone();
    if has_commands(program) {
        let options = program.get_arguments().filter(|arg| !arg.is_positional());
        described = Command::new(CONTROL)
            .args(options.cloned())
            .version(env!("CARGO_PKG_VERSION"))
            .disable_version_flag(true)
            .disable_help_subcommand(true)
            .subcommands(program.get_subcommands().cloned())
            .subcommands(TABLE.iter().map(subcommand))
            .subcommands(MODULES.iter().map(module));
    }
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut described, name, &mut text);
    text
}

/// The words of which one follows a command's name, such as `start` and `stop`.
fn verbs(row: &'static Row) -> Vec<&'static str> {
    let alternatives = row
        .arguments
        .split('|')
        .filter(|_| row.arguments.contains('|'));
    let first = alternatives.filter_map(|words| words.split(' ').next());
    let is_verb = |word: &&str| *word != "all" && word.chars().all(|c| c.is_ascii_lowercase());
    first.filter(is_verb).collect()
}

/// A command of the daemon for completions: its name and its options.
fn subcommand(row: &'static Row) -> Command {
    let mut command = Command::new(row.name)
        .about(row.meaning)
        .disable_help_flag(true);
    let verbs = verbs(row);
    if !verbs.is_empty() {
        command = command.arg(Arg::new("verb").value_parser(verbs));
    }
    let words: BTreeSet<&str> = row.arguments.split([' ', '[', ']']).collect();
    for word in words {
        let arg = match word.strip_prefix('-') {
            // A long option with one dash, which shells know as a word.
            Some("uid") => Arg::new(word).value_parser(["-uid"]),
            Some(letter) if letter.len() == 1 => {
                let takes_value = row.arguments.contains(&format!("{word} "));
                Arg::new(word)
                    .short(letter.chars().next())
                    .action(if takes_value {
                        ArgAction::Set
                    } else {
                        ArgAction::SetTrue
                    })
            }
            Some(long) => Arg::new(word)
                .long(long.trim_start_matches('-'))
                .action(ArgAction::SetTrue),
            None => continue,
        };
        command = command.arg(arg);
    }
    if row.kind == Kind::Lists {
        let option = FORMAT_OPTION.trim_start_matches('-');
        command = command.arg(
            Arg::new(option)
                .long(option)
                .value_parser(["table", "csv", "json"]),
        );
    }
    command
}

/// A module of interface 3 for completions: its verbs and their options.
fn module(module: &'static Module) -> Command {
    let verb = |verb: &'static Verb| {
        let options = verb.options.iter().map(|option| {
            let name = option.name.trim_start_matches('-');
            let action = match option.value {
                Some(_) => ArgAction::Set,
                None => ArgAction::SetTrue,
            };
            Arg::new(name)
                .long(name)
                .help(option.meaning)
                .action(action)
        });
        let command = Command::new(verb.name).about(verb.meaning).args(options);
        command.disable_help_flag(true)
    };
    Command::new(module.name)
        .about(module.meaning)
        .disable_help_flag(true)
        .disable_help_subcommand(true)
        .subcommands(module.verbs.iter().map(verb))
}

#[cfg(test)]
mod tests {
    use super::super::{Control, Run, Server};
    use super::*;

    fn programs() -> [Command; 3] {
        [Control::command(), Run::command(), Server::command()]
    }

    /// The text of a page, without troff's escapes.
    fn page(program: &Command) -> String {
        let mut text = Vec::new();
        manual(program, &mut text).expect("memory");
        String::from_utf8(text).expect("UTF-8").replace("\\-", "-")
    }

    fn options(program: &Command) -> Vec<String> {
        let shown = program.get_arguments().filter(|arg| !arg.is_hide_set());
        shown
            .flat_map(|arg| {
                let long = arg.get_long().map(|long| format!("--{long}"));
                long.into_iter()
                    .chain(arg.get_short().map(|short| format!("-{short}")))
            })
            .collect()
    }

    #[test]
    fn every_command_option_and_variable_is_in_the_manual() {
        for program in programs() {
            let page = page(&program);
            for option in options(&program) {
                assert!(page.contains(&option), "{option} of {}", program.get_name());
            }
            for setting in settings::TABLE {
                assert!(page.contains(setting.name), "{}", setting.name);
            }
            for row in TABLE.iter().filter(|_| has_commands(&program)) {
                assert!(
                    page.contains(&format!("\\fB{}\\fR", row.name)),
                    "{}",
                    row.name
                );
            }
            for module in MODULES.iter().filter(|_| has_commands(&program)) {
                for verb in module.verbs {
                    let name = format!("\\fB{} {}\\fR", module.name, verb.name);
                    assert!(page.contains(&name), "{name}");
                }
            }
            assert!(!page.contains("detached"), "hidden");
            for expected in [
                "cdi generate ",
                "doctor ",
                "-V as well",
                "[\\fIcommand\\fR]",
            ] {
                assert!(!has_commands(&program) || page.contains(expected));
            }
        }
    }

    #[test]
    fn every_command_and_option_is_completed() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            for program in programs() {
                let text = String::from_utf8(completions(&program, shell)).expect("UTF-8");
                let named = |option: &str| match shell {
                    // It writes `-l format` and `-s d`.
                    Shell::Fish => {
                        let kind = if option.starts_with("--") { 'l' } else { 's' };
                        text.contains(&format!("-{kind} {}", option.trim_start_matches('-')))
                    }
                    _ => text.contains(option),
                };
                for option in options(&program) {
                    assert!(
                        named(&option),
                        "{shell}: {option} of {}",
                        program.get_name()
                    );
                }
                for row in TABLE.iter().filter(|_| has_commands(&program)) {
                    assert!(text.contains(row.name), "{shell}: {}", row.name);
                }
            }
        }
    }

    #[test]
    fn what_follows_a_command_is_completed() {
        let text = completions(&Control::command(), Shell::Fish);
        let text = String::from_utf8(text).expect("UTF-8");
        for expected in [
            "_subcommand device_query\" -l csv",
            "_subcommand quit\" -s t -r",
            "_subcommand ps\" -l format",
            "_subcommand client; and __fish_seen_subcommand_from list\" -l server",
        ] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
    }
}

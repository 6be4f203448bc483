//! The command line: `-name` or `--name`, values after `=`, as in NVIDIA's samples.

/// What to do.
#[derive(Debug, PartialEq)]
pub enum Action {
    Help,
    Run(Options),
}

/// How to do it; what is not given is decided once the devices are known.
#[derive(Debug, Default, PartialEq)]
pub struct Options {
    pub compare: bool,
    pub fp64: bool,
    pub num_bodies: Option<usize>,
    pub iterations: Option<usize>,
    pub device: Option<usize>,
    pub num_devices: Option<usize>,
}

pub const HELP: &str = "\
usage: nbody [-benchmark | -compare] [options]

  -benchmark        measure the time of -i steps (the default)
  -compare          run -i steps on the GPU and on the CPU and compare; exit status 1 if they differ
  -numbodies=<N>    number of bodies, rounded up to a multiple of 256
                    (default: 1024 for each multiprocessor; 4096 with -compare)
  -i=<N>            number of steps (default: 10; 1 with -compare)
  -fp64             double precision
  -device=<D>       the device to use (default: 0)
  -numdevices=<N>   spread the bodies over the first N devices
  -h, -help         this text

Every option may also be written with two dashes.
";

/// Reads the arguments that follow the program's name.
pub fn parse(arguments: impl Iterator<Item = String>) -> Result<Action, String> {
    let mut options = Options::default();
    let mut benchmark = false;
    for argument in arguments {
        let Some(option) = argument
            .strip_prefix("--")
            .or_else(|| argument.strip_prefix('-'))
        else {
            return Err(format!("unexpected argument {argument:?}"));
        };
        let (name, value) = match option.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (option, None),
        };
        match (name, value) {
            ("h" | "help", None) => return Ok(Action::Help),
            ("benchmark", None) => benchmark = true,
            ("compare", None) => options.compare = true,
            ("fp64", None) => options.fp64 = true,
            ("numbodies", value) => options.num_bodies = Some(number(name, value, 1)?),
            ("i", value) => options.iterations = Some(number(name, value, 1)?),
            ("device", value) => options.device = Some(number(name, value, 0)?),
            ("numdevices", value) => options.num_devices = Some(number(name, value, 1)?),
            ("h" | "help" | "benchmark" | "compare" | "fp64", Some(_)) => {
                return Err(format!("-{name} takes no value"));
            }
            _ => return Err(format!("unknown option {argument:?}")),
        }
    }
    if benchmark && options.compare {
        return Err("-benchmark and -compare exclude each other".into());
    }
    if options.device.is_some() && options.num_devices.is_some() {
        return Err("-device and -numdevices exclude each other".into());
    }
    Ok(Action::Run(options))
}

/// Kernels count bodies in 32 bits, and whole blocks must fit too.
const LARGEST: usize = i32::MAX as usize - 255;

fn number(name: &str, value: Option<&str>, least: usize) -> Result<usize, String> {
    let value = value.ok_or_else(|| format!("-{name} needs a value: -{name}=<N>"))?;
    match value.parse() {
        Ok(number) if (least..=LARGEST).contains(&number) => Ok(number),
        _ => Err(format!(
            "-{name}={value}: not a whole number from {least} to {LARGEST}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(line: &str) -> Result<Action, String> {
        parse(line.split_whitespace().map(String::from))
    }

    #[test]
    fn one_and_two_dashes_mean_the_same() {
        let expected = Action::Run(Options {
            fp64: true,
            num_bodies: Some(14336),
            iterations: Some(3),
            device: Some(1),
            ..Options::default()
        });
        assert_eq!(
            run("-benchmark -numbodies=14336 -i=3 -fp64 -device=1").as_ref(),
            Ok(&expected)
        );
        assert_eq!(
            run("--benchmark --numbodies=14336 --i=3 --fp64 --device=1").as_ref(),
            Ok(&expected)
        );
    }

    #[test]
    fn help_in_every_spelling() {
        for line in ["-h", "--help", "-help", "-compare --h"] {
            assert_eq!(run(line), Ok(Action::Help), "{line}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (line, part) in [
            ("-bogus", "unknown option \"-bogus\""),
            ("256", "unexpected argument"),
            ("-numbodies", "-numbodies=<N>"),
            ("-numbodies=0", "not a whole number from 1"),
            ("-numbodies=4000000000", "not a whole number"),
            ("-i=many", "-i=many"),
            ("-fp64=1", "takes no value"),
            ("-benchmark -compare", "exclude"),
            ("-device=0 -numdevices=2", "exclude"),
        ] {
            let message = run(line).expect_err(line);
            assert!(message.contains(part), "{line}: {message}");
        }
    }
}

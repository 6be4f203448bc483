//! `top` on a terminal: one thread polls the daemon, this one draws and reads keys.

use super::{FIRST, Look, Options, Sort, columns};
use crate::settings::Settings;
use crate::ui::Ui;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::Paragraph;
use std::time::Duration;

/// Maximum delay until a key is handled, and until a new sample is shown, while nothing else happens.
const PAUSE: Duration = Duration::from_millis(50);

const HELP: &[&str] = &[
    "q    quit",
    "g    sort by GPU%: time with work on the device, in direct mode with a turn",
    "m    sort by device memory",
    "l    sort by launches per second, in direct mode submissions",
    "u    sort by QUEUE: operations not yet completed, and deferred ones",
    "w    sort by WAIT%: time waiting for dispatch, in direct mode for a turn",
    "a    sort by GATE%: time waiting at the gate until nothing was in flight",
    "d    sort by DWAIT%: time in which kernels waited for the device, estimated",
    "o    sort by MWAIT%: time with work, waiting for device memory that is in host memory, or for room",
    "p    sort by process id",
    "r    reverse the order",
    "up, down, page up, page down   scroll",
    "space   refresh now",
    "",
    "THR% is the active-thread percentage; HELD, WAITED and GATED are totals so far.",
    "CTX: the context in use, usually 1, beside long kernels 2 to 4.",
    "AWAITS: the clients that had the device meanwhile, longest first.",
    "BLOCKERS: the clients whose long kernels a call waits for.",
];

/// State of the screen.
struct View {
    look: Option<Look>,
    /// Why there is no new sample.
    trouble: Option<String>,
    sort: Sort,
    reversed: bool,
    help: bool,
    first_row: usize,
    page: usize,
}

/// Action requested by a key, apart from changing the view.
#[derive(Debug, PartialEq, Eq)]
enum Wish {
    Nothing,
    Look,
    End,
}

impl View {
    fn key(&mut self, key: KeyEvent) -> Wish {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        let help = std::mem::take(&mut self.help);
        let mut sort = |by| self.sort = by;
        match key.code {
            KeyCode::Char('c') if control => return Wish::End,
            KeyCode::Char('q') => return Wish::End,
            // Closes the help if it is open, otherwise the program.
            KeyCode::Esc if !help => return Wish::End,
            KeyCode::Char('h' | '?') => self.help = !help,
            KeyCode::Char(' ') => return Wish::Look,
            KeyCode::Char('g') => sort(Sort::Gpu),
            KeyCode::Char('m') => sort(Sort::Memory),
            KeyCode::Char('l') => sort(Sort::Launches),
            KeyCode::Char('u') => sort(Sort::Queue),
            KeyCode::Char('w') => sort(Sort::Wait),
            KeyCode::Char('a') => sort(Sort::Gate),
            KeyCode::Char('d') => sort(Sort::Dwait),
            KeyCode::Char('o') => sort(Sort::Mwait),
            KeyCode::Char('p') => sort(Sort::Pid),
            KeyCode::Char('r') => self.reversed = !self.reversed,
            KeyCode::Up => self.first_row = self.first_row.saturating_sub(1),
            KeyCode::Down => self.first_row += 1,
            KeyCode::PageUp => self.first_row = self.first_row.saturating_sub(self.page),
            KeyCode::PageDown => self.first_row += self.page,
            _ => {}
        }
        Wish::Nothing
    }

    fn draw(&mut self, frame: &mut Frame<'_>) {
        let [top, head, rows, bottom] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(1),
            Constraint::Min(0),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        let width = usize::from(frame.area().width);
        self.page = usize::from(rows.height).max(1);
        let mut lines = Vec::new();
        if let Some(look) = &mut self.look {
            look.sort(self.sort, self.reversed);
            lines = columns::table(look, width);
        }
        let bold = Style::new().add_modifier(Modifier::BOLD);
        match (&self.trouble, &self.look) {
            (Some(trouble), _) => frame.render_widget(Line::styled(trouble.as_str(), bold), top),
            (None, Some(look)) => frame.render_widget(columns::summary(look), top),
            (None, None) => {}
        }
        let mut lines = lines.into_iter();
        let reversed = Style::new().add_modifier(Modifier::REVERSED);
        let header = format!("{:<width$}", lines.next().unwrap_or_default());
        frame.render_widget(Paragraph::new(header).style(reversed), head);
        let lines: Vec<Line<'_>> = match self.help {
            true => HELP.iter().map(|line| Line::from(*line)).collect(),
            false => {
                self.first_row = self.first_row.min(lines.len().saturating_sub(1));
                lines.skip(self.first_row).map(Line::from).collect()
            }
        };
        frame.render_widget(Paragraph::new(lines), rows);
        let order = if self.reversed { ", reversed" } else { "" };
        let sort = format!("{:?}", self.sort).to_lowercase();
        frame.render_widget(format!("sorted by {sort}{order}; h: help, q: quit"), bottom);
    }
}

/// Runs until q is typed.
pub fn run(ui: Ui, settings: &Settings, options: &Options) -> anyhow::Result<()> {
    let (looks, found) = bounded(1);
    let (now, wishes) = bounded(1);
    let (settings, interval) = (settings.clone(), options.interval);
    std::thread::Builder::new()
        .name("looks".into())
        .spawn(move || keep_looking(ui, &settings, interval, &looks, &wishes))?;
    let mut view = View {
        look: None,
        trouble: None,
        sort: options.sort,
        reversed: false,
        help: false,
        first_row: 0,
        page: 1,
    };
    let mut terminal = ratatui::try_init()?;
    let outcome = loop {
        if let Err(error) = terminal.draw(|frame| view.draw(frame)) {
            break Err(error.into());
        }
        match wait(&mut view, &found) {
            Ok(Wish::Nothing) => {}
            Ok(Wish::Look) => {
                // A pending request is enough.
                let _ = now.try_send(());
            }
            Ok(Wish::End) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    ratatui::try_restore()?;
    outcome
}

/// Waits for a key, a sample, or a change of the terminal's size.
fn wait(view: &mut View, found: &Receiver<Result<Look, String>>) -> anyhow::Result<Wish> {
    loop {
        if event::poll(PAUSE)? {
            return Ok(match event::read()? {
                Event::Key(key) if key.kind == KeyEventKind::Press => view.key(key),
                _ => Wish::Nothing,
            });
        }
        match found.try_recv() {
            Ok(Ok(look)) => {
                view.look = Some(look);
                view.trouble = None;
            }
            Ok(Err(trouble)) => view.trouble = Some(trouble),
            Err(_) => continue,
        }
        return Ok(Wish::Nothing);
    }
}

/// Takes samples until the receiver is gone. Reconnects if the daemon ends and another one starts.
fn keep_looking(
    ui: Ui,
    settings: &Settings,
    interval: Duration,
    looks: &Sender<Result<Look, String>>,
    now: &Receiver<()>,
) {
    let mut ui = Some(ui);
    let mut before: Option<Look> = None;
    let mut pause = Duration::ZERO;
    loop {
        match now.recv_timeout(pause) {
            Ok(()) | Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        pause = match before {
            None => interval.min(FIRST),
            Some(_) => interval,
        };
        let connected = match ui.take() {
            Some(ui) => Ok(ui),
            None => Ui::connect(settings).map_err(anyhow::Error::from),
        };
        let look = connected.and_then(|mut connected| {
            let look = Look::take(&mut connected, before.as_ref())?;
            ui = Some(connected);
            Ok(look)
        });
        before = look.as_ref().ok().cloned();
        if looks.send(look.map_err(|error| error.to_string())).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Client;
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn view(clients: i32) -> View {
        let client = |pid| Client {
            pid,
            id: pid as u64,
            held_percentage: Some(f64::from(pid)),
            command: format!("program{pid}"),
            ..Client::default()
        };
        View {
            look: Some(Look {
                time: "12:00:00".into(),
                interval: 1.0,
                clients: (1..=clients).map(client).collect(),
                waiting: Vec::new(),
                at: None,
            }),
            trouble: None,
            sort: Sort::Gpu,
            reversed: false,
            help: false,
            first_row: 0,
            page: 1,
        }
    }

    fn shown(view: &mut View) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(80, 8)).expect("a screen");
        terminal.draw(|frame| view.draw(frame)).expect("draw");
        let text = terminal.backend().to_string();
        let lines = text.lines().map(|line| line.trim_matches('"').trim_end());
        lines.map(str::to_owned).collect()
    }

    fn press(view: &mut View, code: KeyCode) -> Wish {
        view.key(KeyEvent::from(code))
    }

    #[test]
    fn keys_change_what_is_shown() {
        let mut view = view(9);
        let lines = shown(&mut view);
        assert!(
            lines[0].starts_with("12:00:00  9 clients, 1 server"),
            "{lines:?}"
        );
        assert!(lines[1].trim_start().starts_with("PID"), "{lines:?}");
        assert!(lines[2].ends_with("program9"), "{lines:?}");
        assert_eq!(lines[7], "sorted by gpu; h: help, q: quit");
        press(&mut view, KeyCode::Char('p'));
        press(&mut view, KeyCode::Char('r'));
        press(&mut view, KeyCode::PageDown);
        let lines = shown(&mut view);
        assert_eq!(lines[7], "sorted by pid, reversed; h: help, q: quit");
        assert!(lines[2].ends_with("program4"), "{lines:?}");
        for _ in 0..20 {
            press(&mut view, KeyCode::Down);
        }
        assert!(shown(&mut view)[2].ends_with("program1"));
        press(&mut view, KeyCode::Char('h'));
        assert!(shown(&mut view)[2].starts_with("q    quit"));
        assert_eq!(press(&mut view, KeyCode::Esc), Wish::Nothing);
        assert_eq!(press(&mut view, KeyCode::Char(' ')), Wish::Look);
        assert_eq!(press(&mut view, KeyCode::Char('q')), Wish::End);
    }

    #[test]
    fn trouble_is_said_above_what_is_known() {
        let mut view = view(1);
        view.trouble = Some("no daemon".into());
        let lines = shown(&mut view);
        assert_eq!(lines[0], "no daemon");
        assert!(lines[2].ends_with("program1"));
        assert!(shown(&mut View { look: None, ..view })[0].starts_with("no daemon"));
    }
}

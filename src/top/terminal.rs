//! The loop of the terminal: one task reads figures, one thread reads keys, and this loop draws.
//!
//! The terminal is restored when the loop ends, for whatever reason, by a panic, and after SIGTERM, SIGINT and SIGHUP.

use std::time::Duration;

use orlop_client::Error;
use ratatui::{
    DefaultTerminal,
    crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers},
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
    time::sleep,
};

use super::{screen::Screen, views::View};
use crate::insight::{Figures, SIZES_WAIT, Source};

/// Maximum number of events of the terminal, or of results, that wait to be handled. Then their reader waits.
const WAITING_MAX: usize = 16;
/// Number of rows by which page up and page down scroll.
const PAGE_ROWS: usize = 10;

/// Whether the loop goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Continue,
    Quit,
}

/// Restores the terminal when dropped.
struct Restore;

impl Drop for Restore {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Shows a server until the operator quits or a signal arrives.
pub(super) async fn run(source: Source, interval: Duration) -> Result<(), Box<dyn std::error::Error>> {
    let mut signals = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()]
        .map(signal)
        .into_iter()
        .collect::<std::io::Result<Vec<_>>>()?;
    let mut screen = Screen::new(source.endpoint());
    let (pause, paused) = watch::channel(false);
    let (results, mut figures) = mpsc::channel(WAITING_MAX);
    let reader = tokio::spawn(read(source, interval, paused, results));
    // The panic hook restores the terminal before it prints the panic.
    let mut terminal = ratatui::try_init()?;
    let restore = Restore;
    let mut events = events();
    let outcome = loop {
        draw(&mut terminal, &mut screen)?;
        let [terminate, interrupt, hangup] = signals.as_mut_slice() else { unreachable!("there are three signals") };
        tokio::select! {
            result = figures.recv() => match result {
                Some(Ok(figures)) => (screen.figures, screen.problem) = (Some(figures), None),
                Some(Err(error @ Error::Flags(_))) => break Err(error.into()),
                Some(Err(error)) => screen.problem = Some(error.to_string()),
                None => break Err("the task that reads the figures has ended".into()),
            },
            event = events.recv() => match event {
                Some(event) if handle(&event, &mut screen) == Next::Continue => {
                    pause.send_if_modified(|paused| std::mem::replace(paused, screen.is_paused) != screen.is_paused);
                }
                Some(_) | None => break Ok(()),
            },
            _ = terminate.recv() => break Ok(()),
            _ = interrupt.recv() => break Ok(()),
            _ = hangup.recv() => break Ok(()),
        }
    };
    reader.abort();
    drop(restore);
    outcome
}

fn draw(terminal: &mut DefaultTerminal, screen: &mut Screen) -> std::io::Result<()> {
    terminal.draw(|frame| screen.draw(frame)).map(drop)
}

/// Reads figures until the receiver is dropped. A failed read is repeated after the interval.
async fn read(
    mut source: Source,
    interval: Duration,
    mut paused: watch::Receiver<bool>,
    results: mpsc::Sender<Result<Figures, Error>>,
) {
    let mut before = None;
    while paused.wait_for(|paused| !paused).await.is_ok() {
        let result = source.read(SIZES_WAIT).await.map(|now| {
            let figures = Figures::new(before.as_ref(), now);
            before = Some(figures.now.clone());
            figures
        });
        if results.send(result).await.is_err() {
            return;
        }
        sleep(interval).await;
    }
}

/// Starts the thread that reads the events of the terminal. It ends with the process, or when the terminal is closed.
fn events() -> mpsc::Receiver<Event> {
    let (sender, events) = mpsc::channel(WAITING_MAX);
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if sender.blocking_send(event).is_err() {
                return;
            }
        }
    });
    events
}

/// Handles an event. The screen is drawn again after each, so a resize needs nothing else.
fn handle(event: &Event, screen: &mut Screen) -> Next {
    let Event::Key(KeyEvent { code, modifiers, kind: KeyEventKind::Press | KeyEventKind::Repeat, .. }) = event else {
        return Next::Continue;
    };
    if *code == KeyCode::Char('c') && modifiers.contains(KeyModifiers::CONTROL) {
        return Next::Quit;
    }
    if std::mem::take(&mut screen.shows_help) {
        return Next::Continue;
    }
    #[expect(clippy::wildcard_enum_match_arm, reason = "other keys have no effect")]
    match code {
        KeyCode::Char('q') | KeyCode::Esc => return Next::Quit,
        KeyCode::Tab | KeyCode::Right => screen.turn(1),
        KeyCode::BackTab | KeyCode::Left => screen.turn(-1),
        KeyCode::Up => screen.scroll = screen.scroll.saturating_sub(1),
        KeyCode::Down => screen.scroll += 1,
        KeyCode::PageUp => screen.scroll = screen.scroll.saturating_sub(PAGE_ROWS),
        KeyCode::PageDown => screen.scroll += PAGE_ROWS,
        KeyCode::Char('r') => screen.sorts.next(screen.view),
        KeyCode::Char('p') => screen.is_paused = !screen.is_paused,
        KeyCode::Char('?') => screen.shows_help = true,
        KeyCode::Char(digit @ '1'..='6') => {
            let number = (u32::from(*digit) - u32::from('1')) as usize;
            screen.show(View::ALL[number]);
        }
        _ => {}
    }
    Next::Continue
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(code: KeyCode, modifiers: KeyModifiers) -> Event {
        Event::Key(KeyEvent::new(code, modifiers))
    }

    #[test]
    fn keys_have_their_effects() {
        let mut screen = Screen::new(String::new());
        let mut press = |code| {
            let next = handle(&key(code, KeyModifiers::NONE), &mut screen);
            (next, screen.view, screen.scroll, screen.sorts.name(screen.view), screen.is_paused, screen.shows_help)
        };
        use Next::{Continue, Quit};
        use View::{Keys, Overview, Slow};
        for (code, want) in [
            (KeyCode::Tab, (Continue, Keys, 0, "bytes", false, false)),
            (KeyCode::Down, (Continue, Keys, 1, "bytes", false, false)),
            (KeyCode::Char('r'), (Continue, Keys, 1, "keys", false, false)),
            (KeyCode::PageUp, (Continue, Keys, 0, "keys", false, false)),
            (KeyCode::Left, (Continue, Overview, 0, "rate", false, false)),
            (KeyCode::Char('?'), (Continue, Overview, 0, "rate", false, true)),
            (KeyCode::Char('q'), (Continue, Overview, 0, "rate", false, false)),
            (KeyCode::Char('p'), (Continue, Overview, 0, "rate", true, false)),
            (KeyCode::Char('5'), (Continue, Slow, 0, "newest", true, false)),
            (KeyCode::Char('x'), (Continue, Slow, 0, "newest", true, false)),
            (KeyCode::Esc, (Quit, Slow, 0, "newest", true, false)),
            (KeyCode::Char('q'), (Quit, Slow, 0, "newest", true, false)),
        ] {
            assert_eq!(press(code), want, "{code:?}");
        }
        let control_c = key(KeyCode::Char('c'), KeyModifiers::CONTROL);
        screen.shows_help = true;
        assert_eq!(handle(&control_c, &mut screen), Quit);
        assert_eq!(handle(&Event::Resize(10, 10), &mut screen), Continue);
    }
}

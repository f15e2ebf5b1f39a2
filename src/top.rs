//! `orlop top`: a server's state in a terminal, refreshed in place, or printed once.
//!
//! - [`views`]: figures as tables of text; both outputs use them
//! - [`screen`]: draws the tables with ratatui
//! - [`terminal`]: keys, signals, and the loop that reads figures and draws

mod screen;
mod table;
mod terminal;
mod views;

use std::{io::IsTerminal as _, time::Duration};

use orlop_client::ServerFlags;
use tokio::time::sleep;

use self::views::{Sorts, View};
use crate::{
    insight::{Figures, SIZES_WAIT, SIZES_WAIT_MAX, Source},
    output::{Format, json_line, print},
};

/// Number of rows of each table that is printed once.
const PRINTED_ROWS_MAX: usize = 10;
/// Width of the text that is printed once.
const PRINTED_WIDTH: usize = 100;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Time between two reads, over which rates are computed
    #[arg(long, default_value = "1s", value_parser = interval, value_name = "DURATION")]
    interval: Duration,

    /// Read twice, print one screen as text and exit; the default if the output is not a terminal
    #[arg(long)]
    once: bool,

    /// Output format; with json, print one JSON object and exit
    #[arg(short, long, default_value = "simple", value_name = "FORMAT")]
    write_out: Format,

    #[command(flatten)]
    server: ServerFlags,
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if (Duration::from_millis(100)..=Duration::from_secs(3600)).contains(&interval) {
        Ok(interval)
    } else {
        Err("use 100ms to 1h".to_owned())
    }
}

/// Runs the command.
///
/// # Errors
///
/// A text for the operator. If the terminal is refreshed, a server that does not answer is not an error.
pub async fn run(args: Args) -> Result<(), Box<dyn std::error::Error>> {
    let Args { interval, once, write_out, server } = args;
    let source = Source::new(server);
    let is_screen = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    match write_out {
        Format::Simple if is_screen && !once => terminal::run(source, interval).await,
        Format::Simple => Ok(print(text(&read_twice(source, interval).await?).as_bytes())?),
        Format::Json => {
            let json = serde_json::to_string(&read_twice(source, interval).await?)?;
            Ok(print(json_line(&json).as_bytes())?)
        }
    }
}

async fn read_twice(mut source: Source, interval: Duration) -> Result<Figures, orlop_client::Error> {
    let before = source.read(SIZES_WAIT_MAX).await?;
    sleep(interval).await;
    Ok(Figures::new(Some(&before), source.read(SIZES_WAIT).await?))
}

/// Returns all views as text.
fn text(figures: &Figures) -> String {
    let sorts = Sorts::default();
    let mut text = format!("{}\n", views::title(figures));
    for (number, view) in View::ALL.into_iter().enumerate() {
        for table in views::tables(view, figures, sorts) {
            let heading = if number == 0 { String::new() } else { format!("{}\n", table.title) };
            text.push_str(&format!("\n{heading}"));
            let more = table.rows.len().saturating_sub(PRINTED_ROWS_MAX);
            for line in table.lines(PRINTED_WIDTH).into_iter().take(PRINTED_ROWS_MAX + table.head_lines()) {
                text.push_str(line.trim_end());
                text.push('\n');
            }
            if more > 0 {
                text.push_str(&format!("and {more} more\n"));
            }
        }
    }
    text
}

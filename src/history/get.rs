//! `orlop get`: pairs as of a revision or a time.

use orlop_objects::Shown;
use orlop_wire::proto::client::mvccpb::KeyValue;
use serde_json::json;

use super::{
    Ending, Result,
    selection::Selection,
    source::{Source, SourceFlags},
    text::{OutputFlags, pair_json},
    time::{Found, Point},
};
use crate::{
    output::{Format, Reader, json_line, print_to_reader},
    text::shown_key,
};

#[derive(Debug, clap::Args)]
#[command(mut_arg("selected_key", |key| key.required(true)))]
pub struct GetArgs {
    #[command(flatten)]
    selection: Selection,

    /// Point in time: a revision, a duration before now (2h), a time in UTC or now
    #[arg(long, default_value = "now", value_name = "REV|TIME")]
    at: Point,

    /// Only the keys
    #[arg(long)]
    keys_only: bool,

    /// The bytes of the value of a single key, unchanged
    #[arg(long, conflicts_with_all = ["prefix", "keys_only", "write_out"])]
    raw: bool,

    #[command(flatten)]
    output: OutputFlags,

    #[command(flatten)]
    source: SourceFlags,
}

/// Runs `orlop get`.
///
/// # Errors
///
/// A text for the operator.
pub async fn run(args: GetArgs) -> Result<Ending> {
    args.selection.check()?;
    if args.raw && args.selection.is_prefix() {
        return Err("--raw is for a single key".into());
    }
    let source = args.source.open().await?;
    let ending = show(&args, &source).await;
    source.close().await?;
    ending
}

async fn show(args: &GetArgs, source: &Source) -> Result<Ending> {
    let at = source.resolve(args.at).await?;
    let mut pairs = source.pairs(args.selection.range(), at.revision).await?;
    let mut found = 0;
    while let Some(pair) = pairs.next().await? {
        if found == 0 {
            at.report("at", args.output.write_out);
        }
        let reader = if args.raw {
            print_to_reader(&pair.value)?
        } else {
            print_to_reader(text(args, &pair, at, found).as_bytes())?
        };
        found += 1;
        if reader == Reader::Gone {
            break;
        }
    }
    if found == 0 {
        args.selection.report_nothing_found(Some(at));
        return Ok(Ending::Otherwise);
    }
    Ok(Ending::Success)
}

fn text(args: &GetArgs, pair: &KeyValue, at: Found, number: usize) -> String {
    if args.keys_only && args.output.write_out == Format::Simple {
        return format!("{}\n", shown_key(&pair.key));
    }
    let shown = Shown::of(&pair.value, args.output.view());
    match args.output.write_out {
        Format::Json => {
            let mut object = pair_json(pair, &shown);
            object.insert("atRevision".to_owned(), json!(at.revision));
            if args.keys_only {
                object.remove("value");
            }
            json_line(&serde_json::Value::from(object))
        }
        Format::Simple if args.selection.is_prefix() => {
            let separator = if number == 0 { "" } else { "---\n" };
            format!("{separator}# {}  revision {}\n{}", shown_key(&pair.key), pair.mod_revision, shown.text())
        }
        Format::Simple => shown.text(),
    }
}

//! `orlop diff`: what changed in a range between two points in time.

use std::cmp::Ordering;

use orlop_objects::{Shown, diff};
use orlop_wire::proto::client::mvccpb::KeyValue;
use serde_json::{Map, Value, json};

use super::{
    Ending, Result,
    selection::Selection,
    source::{PairStream, Source, SourceFlags},
    text::{OutputFlags, indented, key_json, pair_json},
    time::Point,
};
use crate::{
    output::{Format, Reader, json_line, print_to_reader},
    text::shown_key,
};

/// Lines around a change.
const CONTEXT_LINES: usize = 2;

#[derive(Debug, clap::Args)]
pub struct DiffArgs {
    #[command(flatten)]
    selection: Selection,

    /// First point: a revision, a duration before now (2h), a time in UTC or now
    #[arg(long, value_name = "REV|TIME")]
    from: Point,

    /// Second point
    #[arg(long, default_value = "now", value_name = "REV|TIME")]
    to: Point,

    /// Only the keys, without what changed in their values
    #[arg(long)]
    keys_only: bool,

    #[command(flatten)]
    output: OutputFlags,

    #[command(flatten)]
    source: SourceFlags,
}

/// Runs `orlop diff`.
///
/// # Errors
///
/// A text for the operator.
pub async fn run(args: DiffArgs) -> Result<Ending> {
    args.selection.check()?;
    let source = args.source.open().await?;
    let ending = show(&args, &source).await;
    source.close().await?;
    ending
}

async fn show(args: &DiffArgs, source: &Source) -> Result<Ending> {
    let (from, to) = (source.resolve(args.from).await?, source.resolve(args.to).await?);
    from.report("from", args.output.write_out);
    to.report("to", args.output.write_out);
    let range = args.selection.range();
    let (old, new) = (source.pairs(range.clone(), from.revision).await?, source.pairs(range, to.revision).await?);
    let mut differences = Differences::new(old, new).await?;
    let mut ending = Ending::Success;
    while let Some(difference) = differences.next().await? {
        ending = Ending::Otherwise;
        let text = match args.output.write_out {
            Format::Simple => described(&difference, args.output, args.keys_only),
            Format::Json => {
                let mut object = difference_json(&difference, args.output, args.keys_only);
                object.insert("fromRevision".to_owned(), json!(from.revision));
                object.insert("toRevision".to_owned(), json!(to.revision));
                json_line(&Value::from(object))
            }
        };
        if print_to_reader(text.as_bytes())? == Reader::Gone {
            break;
        }
    }
    Ok(ending)
}

/// A key with different pairs in two states. At least one of the two is present.
pub(super) struct Difference {
    pub(super) old: Option<KeyValue>,
    pub(super) new: Option<KeyValue>,
}

impl Difference {
    pub(super) fn key(&self) -> &[u8] {
        self.old.as_ref().or(self.new.as_ref()).map_or(&[], |pair| &pair.key)
    }

    pub(super) fn verb(&self) -> &'static str {
        match (&self.old, &self.new) {
            (None, _) => "added",
            (_, None) => "deleted",
            (Some(_), Some(_)) => "changed",
        }
    }
}

/// The differences of two states, in the order of keys.
pub(super) struct Differences {
    old: PairStream,
    new: PairStream,
    next: (Option<KeyValue>, Option<KeyValue>),
}

impl Differences {
    pub(super) async fn new(mut old: PairStream, mut new: PairStream) -> Result<Self> {
        let next = (old.next().await?, new.next().await?);
        Ok(Self { old, new, next })
    }

    /// Returns the next key that was put or deleted in between, even if its value is the same again.
    pub(super) async fn next(&mut self) -> Result<Option<Difference>> {
        loop {
            let order = match &self.next {
                (None, None) => return Ok(None),
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some(old), Some(new)) => old.key.cmp(&new.key),
            };
            let mut difference = Difference { old: None, new: None };
            if order != Ordering::Greater {
                difference.old = std::mem::replace(&mut self.next.0, self.old.next().await?);
            }
            if order != Ordering::Less {
                difference.new = std::mem::replace(&mut self.next.1, self.new.next().await?);
            }
            let revision = |pair: &Option<KeyValue>| pair.as_ref().map(|pair| pair.mod_revision);
            if revision(&difference.old) != revision(&difference.new) {
                return Ok(Some(difference));
            }
        }
    }
}

/// Describes a difference.
pub(super) fn described(difference: &Difference, output: OutputFlags, keys_only: bool) -> String {
    if output.write_out == Format::Json {
        return json_line(&Value::from(difference_json(difference, output, keys_only)));
    }
    let revision =
        |pair: &Option<KeyValue>| pair.as_ref().map_or_else(|| "-".to_owned(), |it| it.mod_revision.to_string());
    let heading = format!(
        "{:7}  {}  revision {} -> {}\n",
        difference.verb(),
        shown_key(difference.key()),
        revision(&difference.old),
        revision(&difference.new)
    );
    if keys_only {
        return heading;
    }
    let shown = |pair: &Option<KeyValue>| pair.as_ref().map(|pair| Shown::of(&pair.value, output.view()));
    let (old, new) = (shown(&difference.old), shown(&difference.new));
    heading + &indented(&diff(old.as_ref(), new.as_ref(), CONTEXT_LINES).render(output.style()))
}

fn difference_json(difference: &Difference, output: OutputFlags, keys_only: bool) -> Map<String, Value> {
    let pair = |pair: &Option<KeyValue>| {
        let Some(pair) = pair else { return Value::Null };
        let mut object = pair_json(pair, &Shown::of(&pair.value, output.view()));
        if keys_only {
            object.remove("value");
        }
        Value::from(object)
    };
    let mut object = key_json(difference.key());
    object.insert("type".to_owned(), json!(difference.verb()));
    if let (Some(old), Some(new)) = (&difference.old, &difference.new) {
        // Masked values are shown alike, whatever they are.
        object.insert("valueChanged".to_owned(), json!(old.value != new.value));
    }
    object.insert("old".to_owned(), pair(&difference.old));
    object.insert("new".to_owned(), pair(&difference.new));
    object
}

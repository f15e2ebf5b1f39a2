//! Where the bytes are: the path segments below a prefix as a treemap and as a table.

use axum::response::Response;
use maud::{Markup, html};
use orlop_core::store::sizes::NAME_BYTES_MAX;

use super::{
    Tab, Visit, bytes,
    names::{self, path, shown_name},
    table,
};
use crate::{
    console::{
        backend::Failure,
        query::encoded,
        treemap::{Area, layout},
    },
    insight::{PairSizes, Sized, Sizes},
};

/// Maximum number of areas of the treemap.
const AREAS_MAX: usize = 60;
/// Width and height of the treemaps for wide and narrow screens, and the size of their text.
const FORMATS: [(&str, f64, f64, f64); 2] = [("wide", 1000.0, 380.0, 15.0), ("narrow", 360.0, 360.0, 13.0)];

pub(in crate::console) async fn page(mut visit: Visit) -> Response {
    let place = format!("/sizes/live?prefix={}", encoded(&visit.query.bytes("prefix")));
    let content = content(&mut visit).await.map(|(content, is_complete)| {
        html! {
            h1 { "Sizes" }
            p { "The newest pairs by prefix. Older revisions are not included; a compaction frees them." }
            @if is_complete {
                (content)
            } @else {
                div data-live=(place) data-until="complete" { (content) }
            }
        }
    });
    visit.page(Tab::Sizes, "Sizes", content)
}

pub(in crate::console) async fn live(mut visit: Visit) -> Response {
    let content = content(&mut visit).await.map(|(content, _)| content);
    visit.fragment(content)
}

/// Returns the sizes, and whether they are complete.
async fn content(visit: &mut Visit) -> Result<(Markup, bool), Failure> {
    visit.begin_large().await?;
    let prefix = visit.query.bytes("prefix");
    match visit.visitor.live.sizes(&visit.visitor.client, &prefix).await {
        Some(Ok(sizes)) => Ok((shown(&sizes), true)),
        Some(Err(Failure::LoggedOut)) => Err(Failure::LoggedOut),
        // The rest of the page is shown, also to a user who may not read sizes.
        Some(Err(failure)) => Ok((failure.markup(), true)),
        None => Ok((
            html! { p role="status" { "The sizes are being collected. This can take some seconds with many keys." } },
            false,
        )),
    }
}

fn shown(sizes: &Sizes) -> Markup {
    let total = sizes.total;
    let rest = sizes.children_total.saturating_sub(sizes.children.len() as u64);
    html! {
        div data-complete {
            (path("/sizes", &sizes.prefix.0))
            p {
                strong { (weight(total)) }
                @if total.value_bytes.is_some() { " in " (total.keys) " keys" }
                @if sizes.is_partial { ", and more that were not counted" }
                span.muted { ", as of " (sizes.age_ms / 1000) " s ago" }
            }
            @if sizes.rest.keys > 0 {
                p.muted { "Elsewhere: " (weight(sizes.rest)) " in " (sizes.rest.keys) " keys" }
            }
            @if sizes.children.is_empty() {
                p { "There are no keys with this prefix." }
            } @else {
                @for format in FORMATS { (treemap(sizes, format)) }
                div.columns {
                    section {
                        h2 { "By prefix" }
                        (children("Sizes by prefix", sizes, &sizes.children))
                        @if rest > 0 { p.muted { (rest) " more are not shown." } }
                    }
                    @if !sizes.largest_keys.is_empty() {
                        section {
                            h2 { "Largest keys" }
                            (children("Largest keys", sizes, &sizes.largest_keys[..sizes.largest_keys.len().min(20)]))
                        }
                    }
                }
            }
        }
    }
}

/// Returns the bytes, or the number of keys if the server does not report the sizes of values.
fn weight(sizes: PairSizes) -> String {
    if sizes.value_bytes.is_some() { bytes(sizes.bytes()) } else { format!("{} keys", sizes.keys) }
}

fn number(sizes: PairSizes) -> f64 {
    sizes.amount().max(1) as f64
}

/// Returns the address of a child's page. There is none if the server may have cut the name.
fn href(child: &Sized) -> Option<String> {
    let place = if child.is_prefix { "/sizes?prefix=" } else { "/key?key=" };
    names::href(place, &child.name.0).filter(|_| child.name.0.len() < NAME_BYTES_MAX)
}

/// Returns the part of a child's name below the prefix, or the whole name. The largest keys can be elsewhere.
fn below<'a>(sizes: &Sizes, child: &'a Sized) -> &'a [u8] {
    let below = child.name.0.strip_prefix(&*sizes.prefix.0).unwrap_or_default();
    if below.is_empty() { &child.name.0 } else { below }
}

fn children(title: &str, sizes: &Sizes, children: &[Sized]) -> Markup {
    let all = number(sizes.all());
    let rows = html! {
        @for child in children {
            tr {
                td.wide { (names::linked(href(child), &names::name(below(sizes, child)))) }
                td.number { (weight(child.sizes)) }
                td.number { (format!("{:.1} %", number(child.sizes) * 100.0 / all)) }
                td.number { (child.sizes.keys) }
            }
        }
    };
    table(title, &["Name", "Size", "Share", "Keys"], rows)
}

/// Returns the treemap. The table has the same content, so programs that read the page aloud skip the treemap.
fn treemap(sizes: &Sizes, (class, width, height, text): (&str, f64, f64, f64)) -> Markup {
    let children = &sizes.children[..sizes.children.len().min(AREAS_MAX)];
    let numbers: Vec<f64> = children.iter().map(|child| number(child.sizes)).collect();
    let areas = layout(&numbers, Area { x: 0.0, y: 0.0, width, height });
    html! {
        svg class=(format!("treemap {class}")) viewBox=(format!("0 0 {width} {height}")) aria-hidden="true" {
            @for (at, (child, area)) in children.iter().zip(areas).enumerate() {
                @let label = shown_name(below(sizes, child));
                a href=[href(child)] tabindex="-1" {
                    title { (label) ": " (weight(child.sizes)) ", " (child.sizes.keys) " keys" }
                    rect class=(format!("area{}", at % 6)) x=(format!("{:.1}", area.x)) y=(format!("{:.1}", area.y))
                        width=(format!("{:.1}", area.width)) height=(format!("{:.1}", area.height)) {}
                    @if area.height > text * 1.6 && area.width > text * 3.0 {
                        text x=(format!("{:.1}", area.x + 5.0)) y=(format!("{:.1}", area.y + text * 1.2)) {
                            (cut(&label, area.width - 8.0, text))
                        }
                    }
                    @if area.height > text * 3.0 && area.width > text * 5.0 {
                        text.muted x=(format!("{:.1}", area.x + 5.0)) y=(format!("{:.1}", area.y + text * 2.5)) {
                            (cut(&weight(child.sizes), area.width - 8.0, text))
                        }
                    }
                }
            }
        }
    }
}

/// Cuts a label to about a width.
fn cut(label: &str, width: f64, text: f64) -> String {
    let letter = text * 0.58;
    if label.chars().count() as f64 * letter <= width {
        return label.to_owned();
    }
    let fits = |(at, _): &(usize, char)| (at + 2) as f64 * letter <= width;
    label.chars().enumerate().take_while(fits).map(|(_, letter)| letter).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::insight::KeyName;

    #[test]
    fn names_are_shown_below_the_prefix_or_whole() {
        let sizes = Sizes { prefix: KeyName(b"/registry/".into()), ..Sizes::default() };
        for (name, shown) in
            [("/registry/pods/a", "pods/a"), ("/registry/", "/registry/"), ("compact_rev_key", "compact_rev_key")]
        {
            let child = Sized { name: KeyName(name.into()), ..Sized::default() };
            assert_eq!(below(&sizes, &child), shown.as_bytes(), "{name}");
        }
    }

    #[test]
    fn keys_are_counted_once() {
        let of_orlop = PairSizes { keys: 271, key_bytes: 1_000, value_bytes: Some(24) };
        for (total, is_partial, want) in [
            (of_orlop, false, "<strong>1.0 KiB</strong> in 271 keys<span"),
            (PairSizes { value_bytes: None, ..of_orlop }, false, "<strong>271 keys</strong><span"),
            (
                PairSizes { value_bytes: None, ..of_orlop },
                true,
                "<strong>271 keys</strong>, and more that were not counted<span",
            ),
        ] {
            let page = shown(&Sizes { total, is_partial, ..Sizes::default() }).0;
            assert!(page.contains(want), "{want}: {page}");
        }
    }
}

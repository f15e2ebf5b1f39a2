//! The text of `/metrics`, in Prometheus' text format.

use std::collections::BTreeMap;

/// The metrics of a server at one time.
#[derive(Clone, Debug, Default)]
pub struct MetricsPage(String);

/// Labels by name.
pub type Labels<'a> = BTreeMap<&'a str, &'a str>;

impl MetricsPage {
    pub fn new(text: String) -> Self {
        Self(text)
    }

    /// Returns the value of a metric without labels.
    pub fn value(&self, name: &str) -> Option<f64> {
        self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
    }

    /// Returns the labels and values of a metric with labels. Escapes in the labels remain.
    pub fn series<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (Labels<'a>, f64)> {
        self.0.lines().filter_map(move |line| {
            let (labels, value) = line.strip_prefix(name)?.strip_prefix('{')?.rsplit_once('}')?;
            Some((parse_labels(labels), value.trim().parse().ok()?))
        })
    }
}

fn parse_labels(mut text: &str) -> Labels<'_> {
    let mut labels = Labels::new();
    while let Some((name, rest)) = text.split_once("=\"") {
        let mut is_escaped = false;
        let end = rest.find(|c| {
            let ends = c == '"' && !is_escaped;
            is_escaped = c == '\\' && !is_escaped;
            ends
        });
        let Some(end) = end else { break };
        labels.insert(name.trim_start_matches([',', ' ']), &rest[..end]);
        text = &rest[end + 1..];
    }
    labels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metric_is_found_by_its_full_name() {
        let page = MetricsPage::new("# HELP a_b c\na_b_c 1\na_b{d=\"e\"} 2\na_b 3.5\nbig 1.5e+09\n".to_owned());
        for (name, want) in [("a_b", Some(3.5)), ("a_b_c", Some(1.0)), ("a", None), ("big", Some(1.5e9)), ("z", None)] {
            assert_eq!(page.value(name), want, "{name}");
        }
    }

    #[test]
    fn labels_are_parsed() {
        let page =
            MetricsPage::new("a{b=\"c\",d=\"e\\\",}f\",g=\"\"} +Inf\na{b=\"broken} 1\nab{b=\"x\"} 2\n".to_owned());
        let found: Vec<_> = page.series("a").collect();
        let want = Labels::from([("b", "c"), ("d", "e\\\",}f"), ("g", "")]);
        assert_eq!(found, [(want, f64::INFINITY), (Labels::new(), 1.0)]);
    }
}

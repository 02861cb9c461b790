// A box above a long page that hides the rows, or the rules, in which the words typed do not all stand.
document.addEventListener("DOMContentLoaded", function () {
  document.querySelectorAll("div.filter").forEach(function (place) {
    var bugs = place.dataset.rows === "bugs";
    var page = place.parentElement;
    var box = document.createElement("input");
    box.type = "search";
    box.placeholder = bugs ? "filter: an engine, a number, a word, a rule" : "filter: a check, a word, a bug";
    box.setAttribute("aria-label", "filter this page");
    var count = document.createElement("span");
    place.append(box, count);
    var entries = bugs ? rows(page) : rules(page);
    box.addEventListener("input", function () {
      var words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
      var shown = 0;
      entries.forEach(function (entry) {
        var text = entry.map(function (one) { return one.textContent; }).join(" ").toLowerCase();
        var fits = words.every(function (word) { return text.includes(word); });
        entry.forEach(function (one) { one.hidden = !fits; });
        shown += fits ? 1 : 0;
      });
      count.textContent = words.length ? shown + " of " + entries.length : "";
    });
  });

  function rows(page) {
    return Array.from(page.querySelectorAll("tbody tr")).map(function (row) { return [row]; });
  }

  function rules(page) {
    return Array.from(page.querySelectorAll("a[id^='rule-']")).map(function (anchor) {
      var entry = [anchor.parentElement];
      var next = anchor.parentElement.nextElementSibling;
      while (next && next.tagName === "P" && !next.querySelector("a[id^='rule-']")) {
        entry.push(next);
        next = next.nextElementSibling;
      }
      return entry;
    });
  }
});
